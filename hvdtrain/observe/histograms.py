"""Histograms of a model's parameters and gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.observe.failure.fault import out_of_memory

BINS = 32

_CHUNK = 1 << 20
"""Values at a time: some 20 MiB of memory, whatever the tensor's size."""


class Histograms:
    """Makes the histograms of a run. One that memory does not suffice for is left out; it ends no training.

    Args:
        warn: told of that, once.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._has_warned = False

    def summaries(self, model: nn.Module) -> dict[str, dict[str, Any]]:
        """Of each parameter and of each gradient as they are now, under ``parameters`` and ``gradients``, by name.

        Nothing is changed; on CUDA the device is waited for.
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
                self._say(name, error)
        return found

    def _say(self, name: str, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            text = str(error).splitlines() or [type(error).__name__]
            self._warn(
                f"no memory for the histogram of {name}; histograms are left out where it does not suffice"
                f" (--observe.histograms_every 0 makes none): {text[0]}"
            )


@torch.no_grad()
def histogram(values: Tensor) -> dict[str, Any]:
    """`BINS` bins of equal width from the smallest to the largest value, of any shape and floating dtype.

    Returns:
        ``min``, ``max``, ``num``, ``sum``, ``sum_squares`` of the finite values; ``limits``, the upper edges of the
        bins, and ``counts``; ``not_finite``, how many others there are.
    """
    flat = _flat(values.detach())
    parts = [_sums(chunk) for chunk in torch.split(flat, _CHUNK)] if flat.numel() else []
    if not parts or not (table := torch.stack(parts))[:, 2].any():
        nothing = {"min": 0.0, "max": 0.0, "num": 0.0, "sum": 0.0, "sum_squares": 0.0}
        return {**nothing, "limits": [0.0], "counts": [0.0], "not_finite": flat.numel()}
    edges = torch.stack([table[:, 0].amin(), table[:, 1].amax()])
    low, high, num, total, squares = torch.cat([edges, table[:, 2:].sum(0)]).tolist()
    if low == high:
        limits, counts = [high], [num]
    else:
        limits = [low + (high - low) * place / BINS for place in range(1, BINS)] + [high]
        counts = _counts(flat, low, high)
    return {
        "min": low,
        "max": high,
        "num": num,
        "sum": total,
        "sum_squares": squares,
        "limits": limits,
        "counts": counts,
        "not_finite": flat.numel() - int(num),
    }


def _flat(values: Tensor) -> Tensor:
    """(N,), in the order of memory: without a copy of channels-last weights too."""
    order = sorted(range(values.dim()), key=values.stride, reverse=True)
    return values.permute(order).reshape(-1)


def _wide(chunk: Tensor) -> Tensor:
    return chunk if chunk.dtype == torch.float64 else chunk.float()


def _sums(chunk: Tensor) -> Tensor:
    """Smallest, largest, number, sum and sum of squares of the finite values: (5,) float64 on its device."""
    wide = _wide(chunk)
    finite = wide.isfinite()
    exact = wide.double().where(finite, 0.0)
    low, high = wide.where(finite, torch.inf).amin(), wide.where(finite, -torch.inf).amax()
    return torch.stack([low.double(), high.double(), finite.sum().double(), exact.sum(), exact.square().sum()])


def _counts(flat: Tensor, low: float, high: float) -> list[float]:
    """How many finite values are in each bin. Not by histc, which deterministic algorithms forbid on CUDA."""
    counts = torch.zeros(BINS + 1, dtype=torch.int64, device=flat.device)
    for chunk in torch.split(flat, _CHUNK):
        place = ((chunk.double() - low) * (BINS / (high - low))).clamp_(0, BINS - 1)
        place = place.where(chunk.isfinite(), BINS).nan_to_num_(BINS)  # the last bin is theirs, and is not told
        counts += torch.bincount(place.long(), minlength=BINS + 1)
    return [float(count) for count in counts[:BINS].tolist()]
