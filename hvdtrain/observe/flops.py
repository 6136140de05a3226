"""Floating point operations: the number in a forward pass, and the peak of a device."""

from __future__ import annotations

import logging
import re
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

log = logging.getLogger(__name__)

_PEAKS: tuple[tuple[str, dict[str, float], str], ...] = (
    ("B200", {"fp32": 75, "tf32": 1125, "half": 2250}, "NVIDIA HGX B200 data sheet, an eighth"),
    ("H200 NVL|H100 NVL", {"fp32": 60, "tf32": 417.5, "half": 835.5}, "NVIDIA H100 NVL and H200 NVL data sheets"),
    ("H100 PCIe", {"fp32": 51, "tf32": 378, "half": 756.5}, "NVIDIA H100 data sheet, PCIe"),
    ("H100|H200|GH200|H800", {"fp32": 67, "tf32": 494.5, "half": 989.5}, "NVIDIA H100 and H200 data sheets, SXM"),
    ("A100|A800", {"fp32": 19.5, "tf32": 156, "half": 312}, "NVIDIA A100 data sheet"),
    ("A40", {"fp32": 37.4, "tf32": 74.8, "half": 149.7}, "NVIDIA A40 data sheet"),
    ("A30", {"fp32": 10.3, "tf32": 82, "half": 165}, "NVIDIA A30 data sheet"),
    ("A10", {"fp32": 31.2, "tf32": 62.5, "half": 125}, "NVIDIA A10 data sheet"),
    ("L40S", {"fp32": 91.6, "tf32": 183, "half": 362}, "NVIDIA L40S data sheet"),
    ("L40", {"fp32": 90.5, "tf32": 90.5, "half": 181}, "NVIDIA L40 data sheet"),
    ("L4", {"fp32": 30.3, "tf32": 60, "half": 121}, "NVIDIA L4 data sheet"),
    ("V100-SXM.*", {"fp32": 15.7, "fp16": 125}, "NVIDIA V100 data sheet, NVLink"),
    ("V100-PCIE.*", {"fp32": 14, "fp16": 112}, "NVIDIA V100 data sheet, PCIe"),
    ("T4", {"fp32": 8.1, "fp16": 65}, "NVIDIA T4 data sheet"),
    ("RTX 4090$", {"fp32": 82.6, "tf32": 82.6, "half": 165.2}, "NVIDIA Ada architecture white paper"),
    ("RTX 3090$", {"fp32": 35.6, "tf32": 35.6, "half": 71}, "NVIDIA GA102 architecture white paper"),
    ("MI300X", {"fp32": 163.4, "tf32": 653.7, "half": 1307.4}, "AMD Instinct MI300X data sheet"),
)
"""Device names, TFLOP/s without sparsity and with sums in fp32, and the source. ``half`` is bf16 and fp16."""


def peak_tflops(device: str, precision: str, *, tf32: bool) -> tuple[float, str] | None:
    """Return the peak of a device, by its name in torch, in TFLOP/s, and the source; None if it is not known.

    `tf32`: whether fp32 products may be rounded to TF32.
    """
    wanted = ("tf32" if tf32 else "fp32",) if precision == "fp32" else (precision, "half")
    if " MIG " in device:  # a part of a device
        return None
    for names, peaks, source in _PEAKS:
        if re.search(rf"\b({names})(?!\w)", device):
            # A device without TF32 computes in fp32 where TF32 is allowed.
            found = [peaks[name] for name in (*wanted, *(["fp32"] if precision == "fp32" else [])) if name in peaks]
            return (found[0], source) if found else None
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
