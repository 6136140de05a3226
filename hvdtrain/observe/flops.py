"""Floating point operations: the number in a forward pass, and the peak of a device."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

log = logging.getLogger(__name__)


def peak_tflops(device: str, precision: str, *, tf32: bool) -> tuple[float, str] | None:
    """Return the peak of a device, by its name in torch, in TFLOP/s, and the source; None if it is not known.

    `peaks.json` has them without sparsity and with sums in fp32. ``half`` is bf16 and fp16.

    `tf32`: whether fp32 products may be rounded to TF32.
    """
    wanted = ("tf32" if tf32 else "fp32",) if precision == "fp32" else (precision, "half")
    if " MIG " in device:  # a part of a device
        return None
    for row in json.loads(Path(__file__).with_name("peaks.json").read_text("utf-8")):
        if re.search(rf"\b({row['devices']})(?!\w)", device):
            peaks = row["tflops"]
            # A device without TF32 computes in fp32 where TF32 is allowed.
            found = [peaks[name] for name in (*wanted, *(["fp32"] if precision == "fp32" else [])) if name in peaks]
            return (found[0], row["source"]) if found else None
    return None


def _grouped_mm(a: Tensor, b: Tensor, *others: Any, **options: Any) -> int:
    """Count one product per group. Where a shape has no group dimension, its T is split among the groups.

    (T, K) by (G, K, N), (G, M, K) by (K, T), (G, M, K) by (G, K, N), or (M, T) by (T, N).
    """
    groups = a.shape[0] if a.dim() == b.dim() == 3 else 1
    return 2 * groups * a.shape[-2] * a.shape[-1] * b.shape[-1]


_ATTENTION = flop_registry[torch.ops.aten._scaled_dot_product_flash_attention]
_OWN = {"_grouped_mm": _grouped_mm, "_scaled_dot_product_flash_attention_for_cpu": _ATTENTION}

FORMULAS = dict(flop_registry)
FORMULAS |= {getattr(torch.ops.aten, name): own for name, own in _OWN.items() if hasattr(torch.ops.aten, name)}
"""Formulas of torch's counter, and ours for products of a mixture of experts and for attention on the CPU."""


class FlopCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context manager that counts operations of matrix products, convolutions and attention; a multiply-add is two.

    Results stay bit-identical. torch's own FlopCounterMode decomposes operations, adds hooks to modules, and prevents
    compiled parts from running compiled.
    """

    supports_higher_order_operators = True  # without it, such as flex_attention raise

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops: int | None = 0  # count so far; None after the formula of an operation failed

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled parts run compiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count it."""
        out = func(*args, **(kwargs or {}))
        formula = FORMULAS.get(getattr(func, "overloadpacket", func))
        # A loss by chunks computes its gradients at once: these are no part of a forward pass.
        if formula is not None and self.flops is not None and torch._C._current_autograd_node() is None:
            try:
                self.flops += int(formula(*args, **(kwargs or {}), out_val=out))
            except Exception as error:
                log.debug("FLOPs are not counted: %s: %s: %s", func, type(error).__name__, error)
                self.flops = None
        return out
