"""Histograms of a model's parameters and gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

BINS = 32


def histograms(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Of each parameter and of each gradient as they are now, under ``parameters`` and ``gradients``, by name.

    Nothing is changed; on CUDA the device is waited for.
    """
    parameters = dict(model.named_parameters())
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None and not p.grad.is_sparse}
    return {
        "parameters": {name: histogram(p) for name, p in parameters.items()},
        "gradients": {name: histogram(g) for name, g in gradients.items()},
    }


@torch.no_grad()
def histogram(values: Tensor) -> dict[str, Any]:
    """`BINS` bins of equal width from the smallest to the largest value, of any shape and floating dtype.

    Returns:
        ``min``, ``max``, ``num``, ``sum``, ``sum_squares`` of the finite values; ``limits``, the upper edges of the
        bins, and ``counts``; ``not_finite``, how many others there are.
    """
    flat = values.detach().reshape(-1)
    flat = flat if flat.dtype == torch.float64 else flat.float()
    finite = flat[flat.isfinite()]
    lost = flat.numel() - finite.numel()
    if not finite.numel():
        nothing = {"min": 0.0, "max": 0.0, "num": 0.0, "sum": 0.0, "sum_squares": 0.0}
        return {**nothing, "limits": [0.0], "counts": [0.0], "not_finite": lost}
    low, high = (float(edge) for edge in torch.aminmax(finite))
    if low == high:
        limits, counts = [high], [float(finite.numel())]
    else:
        limits = [low + (high - low) * place / BINS for place in range(1, BINS)] + [high]
        counts = torch.histc(finite, BINS, low, high).tolist()
    return {
        "min": low,
        "max": high,
        "num": float(finite.numel()),
        "sum": float(finite.sum(dtype=torch.float64)),
        "sum_squares": float(finite.double().square().sum()),
        "limits": limits,
        "counts": counts,
        "not_finite": lost,
    }
