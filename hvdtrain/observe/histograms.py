"""Histograms of a model's parameters and gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.observe.failure.fault import out_of_memory

BINS = 32

_SUMS = ("min", "max", "num", "sum", "sum_squares")
_CHUNK = 1 << 20
"""Values per chunk: about 20 MiB of memory for a tensor of any size."""


class Histograms:
    """Computes the histograms of a run. If memory runs out, it skips a histogram; the first time, it warns."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._has_warned = False

    def summaries(self, model: nn.Module) -> dict[str, dict[str, Any]]:
        """Return histograms of each parameter and gradient by name, under ``parameters`` and ``gradients``.

        Changes nothing. Synchronizes with a CUDA device.
        """
        parameters = dict(model.named_parameters())
        gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None and not p.grad.is_sparse}
        return {"parameters": self._each(parameters), "gradients": self._each(gradients)}

    def _each(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        found = {}
        for name, values in tensors.items():
            try:
                found[name] = histogram(values)
            except Exception as error:
                if not out_of_memory(error):
                    raise
                if not self._has_warned:
                    self._has_warned = True
                    text = str(error).splitlines() or [type(error).__name__]
                    self._warn(
                        f"out of memory for the histogram of {name}; such histograms are skipped"
                        f" (--observe.histograms_every 0 turns all off): {text[0]}"
                    )
        return found


@torch.no_grad()
def histogram(values: Tensor) -> dict[str, Any]:
    """Return a histogram of `BINS` bins of equal width, from the smallest to the largest value, for any floating dtype.

    Returns:
        ``min``, ``max``, ``num``, ``sum``, ``sum_squares`` of the finite values; ``limits``, the upper edges of the
        bins, and ``counts``; ``not_finite``, the number of other values.
    """
    order = sorted(range(values.dim()), key=values.stride, reverse=True)
    flat = values.detach().permute(order).reshape(-1)  # memory order needs no copy, also of channels-last weights
    parts = [_sums(chunk) for chunk in torch.split(flat, _CHUNK)] if flat.numel() else []
    if not parts or not (table := torch.stack(parts))[:, 2].any():
        nothing = dict.fromkeys(_SUMS, 0.0)
        return {**nothing, "limits": [0.0], "counts": [0.0], "not_finite": flat.numel()}
    edges = torch.stack([table[:, 0].amin(), table[:, 1].amax()])
    low, high, num, *sums = torch.cat([edges, table[:, 2:].sum(0)]).tolist()
    if low == high:
        limits, counts = [high], [num]
    else:
        limits = [low + (high - low) * place / BINS for place in range(1, BINS)] + [high]
        counts = _counts(flat, low, high)
    found = dict(zip(_SUMS, (low, high, num, *sums), strict=True))
    return {**found, "limits": limits, "counts": counts, "not_finite": flat.numel() - int(num)}


def _sums(chunk: Tensor) -> Tensor:
    """Return `_SUMS` of the finite values: (5,) float64 on the device."""
    wide = chunk if chunk.dtype == torch.float64 else chunk.float()
    finite = wide.isfinite()
    exact = wide.double().where(finite, 0.0)
    low, high = wide.where(finite, torch.inf).amin(), wide.where(finite, -torch.inf).amax()
    return torch.stack([low.double(), high.double(), finite.sum().double(), exact.sum(), exact.square().sum()])


def _counts(flat: Tensor, low: float, high: float) -> list[float]:
    """Count the finite values in each bin. Deterministic algorithms forbid `histc` on CUDA."""
    counts = torch.zeros(BINS + 1, dtype=torch.int64, device=flat.device)
    for chunk in torch.split(flat, _CHUNK):
        place = ((chunk.double() - low) * (BINS / (high - low))).clamp_(0, BINS - 1)
        place = place.where(chunk.isfinite(), BINS).nan_to_num_(BINS)  # an extra bin for them, dropped below
        counts += torch.bincount(place.long(), minlength=BINS + 1)
    return [float(count) for count in counts[:BINS].tolist()]
