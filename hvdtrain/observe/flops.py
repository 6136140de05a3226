"""Floating point operations: how many a forward pass takes, and how many a device can do at most."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

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
"""Device names, TFLOP/s without sparsity and with sums in fp32, and where they stand. ``half`` is bf16 and fp16."""


def peak_tflops(device: str, precision: str, *, tf32: bool) -> tuple[float, str] | None:
    """What a device can do at most.

    Args:
        device: its name as torch gives it.
        precision: fp32, bf16 or fp16.
        tf32: whether products of fp32 may be rounded to TF32.

    Returns:
        TFLOP/s and where the figure stands; None for a device or a precision that is not known.
    """
    wanted = ("tf32" if tf32 else "fp32",) if precision == "fp32" else (precision, "half")
    if " MIG " in device:  # a part of one
        return None
    for names, peaks, source in _PEAKS:
        if re.search(rf"\b({names})(?!\w)", device):
            # A device without TF32 computes in fp32 where TF32 was allowed.
            found = [peaks[name] for name in (*wanted, *(["fp32"] if precision == "fp32" else [])) if name in peaks]
            return (found[0], source) if found else None
    return None


def count_flops(forward: Callable[[], object]) -> int:
    """Operations of matrix products, convolutions and attention that `forward` runs, a multiply-add as two."""
    with FlopCounterMode(display=False, custom_mapping=_OWN) as counter:
        forward()
    return int(counter.get_total_flops())


def _grouped_mm(a: tuple[int, ...], b: tuple[int, ...], *others: Any, **options: Any) -> int:
    """One product a group; where shapes lack the group, a side's T is split among the groups.

    (T, K) by (G, K, N), (G, M, K) by (K, T), (G, M, K) by (G, K, N), or (M, T) by (T, N).
    """
    groups = a[0] if len(a) == len(b) == 3 else 1
    return 2 * groups * a[-2] * a[-1] * b[-1]


def _attention_on_cpu(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], *others: Any, **options: Any) -> int:
    return int(sdpa_flop_count(q, k, v))  # type: ignore[no-untyped-call]


def _own() -> dict[Any, Any]:
    aten, found = torch.ops.aten, {}
    for name, formula in (
        ("_grouped_mm", _grouped_mm),
        ("_scaled_dot_product_flash_attention_for_cpu", _attention_on_cpu),
    ):
        if hasattr(aten, name):
            found[getattr(aten, name)] = formula
    return found


_OWN = _own()
"""What torch's counter does not know: the products of a mixture of experts, and attention on the CPU."""


@contextmanager
def untouched(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Put back what a forward pass within may change: modes, buffers, and Python's, numpy's and torch's randomness.

    The model is in evaluation mode within, and no gradients are recorded.
    """
    modes = {module: module.training for module in model.modules()}
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in modes
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    states = random.getstate(), np.random.get_state()
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices), torch.no_grad():
            model.eval()
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        for module, training in modes.items():
            module.training = training
        with torch.no_grad():
            for module, name, buffer, content in buffers:
                buffer.copy_(content)
                module._buffers[name] = buffer
