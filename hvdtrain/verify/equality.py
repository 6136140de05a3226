"""Two runs beside each other: bit for bit, or to a tolerance. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hvdtrain.verify.runs import Outcome

LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2, "fp16": 5e-2}
"""Relative, by precision: sums over ranks are made in another order."""

TENSOR_TOLERANCE = {"fp32": 1e-2, "bf16": 0.5, "fp16": 0.5}
"""Of the L2 norm of a tensor. Where a gradient is near 0, an adaptive optimizer makes much of a last bit."""


@dataclass(frozen=True)
class Compared:
    """What was found.

    Attributes:
        what: was compared with what.
        exact: bit for bit, or to a tolerance.
        steps: whose losses were compared.
        tensors: that were compared.
        loss: largest relative difference of a loss.
        tensor: largest difference of a tensor, of its norm.
        first: the first thing that differs by more than it may; None where the law holds.
    """

    what: str
    exact: bool
    steps: int
    tensors: int
    loss: float
    tensor: float
    first: str | None


def compare(what: str, found: Outcome, wanted: Outcome, *, exact: bool, precision: str) -> Compared:
    """Compare losses, positions and the last state of two runs of the same steps."""
    differences = [_relative(a, b) for a, b in zip(found.losses, wanted.losses, strict=False)]
    # What compression carries on belongs to a number of ranks.
    tensors = dict(_tensors(found, wanted, ("model", "optimizer", *(["exchange"] if exact else []))))
    most = 0.0 if exact else LOSS_TOLERANCE[precision]
    first = _first_step(found, wanted, differences, most)
    if first is None:
        most = 0.0 if exact else TENSOR_TOLERANCE[precision]
        first = next((_told(name, how, most) for name, how in sorted(tensors.items()) if not how <= most), None)
    if first is None and exact:
        first = _first_value(found.state.values, wanted.state.values)
    return Compared(
        what, exact, len(differences), len(tensors), max(differences, default=0.0), max(tensors.values()), first
    )


def _first_step(found: Outcome, wanted: Outcome, differences: list[float], most: float) -> str | None:
    if found.positions != wanted.positions:
        pairs = enumerate(zip(found.positions, wanted.positions, strict=False), 1)
        step, pair = next(((s, (a, b)) for s, (a, b) in pairs if a != b), (0, (0, 0)))
        if not step:
            return f"{len(found.positions)} steps were done, not {len(wanted.positions)}"
        return f"step {step} ended at position {pair[0]}, not {pair[1]}"
    step = next((number for number, how in enumerate(differences, 1) if not how <= most), 0)
    if not step:
        return None
    return f"step {step}: loss {found.losses[step - 1]!r}, not {wanted.losses[step - 1]!r}"


def _told(name: str, how: float, most: float) -> str:
    return f"tensor {name}: by {how:.3g} of its norm" + (f", more than {most:g}" if most else "")


def _first_value(found: Mapping[str, Any], wanted: Mapping[str, Any], prefix: str = "") -> str | None:
    for name in sorted(found.keys() | wanted.keys()):
        a, b = found.get(name), wanted.get(name)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            inner = _first_value(a, b, f"{prefix}{name}.")
            if inner is not None:
                return inner
        elif a != b:
            return f"{prefix}{name} is {str(a)[:60]}, not {str(b)[:60]}"
    return None


def _tensors(found: Outcome, wanted: Outcome, groups: Sequence[str]) -> Iterator[tuple[str, float]]:
    ours, theirs = found.state.tensors, wanted.state.tensors
    for group in groups:
        a, b = ours.get(group, {}), theirs.get(group, {})
        for name in a.keys() | b.keys():
            yield f"{group}: {name}", _distance(a.get(name), b.get(name))


def _distance(a: Tensor | None, b: Tensor | None) -> float:
    """Of their L2 norm; 0 only where every bit is the same, inf where they cannot be compared."""
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if torch.equal(_bits(a), _bits(b)):
        return 0.0
    difference = float((a.double() - b.double()).norm())
    norm = float(b.double().norm())
    return max(difference / norm if norm else difference, 1e-300)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _relative(a: float | None, b: float | None) -> float:
    if a == b:
        return 0.0
    if a is None or b is None:
        return float("inf")
    return abs(a - b) / max(abs(a), abs(b))
