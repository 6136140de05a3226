"""Compare two runs bit for bit, or with a tolerance. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hvdtrain.state.pieces import StateDict

LOSS_TOLERANCE = 1e-4
"""Relative tolerance of losses in fp32: another world size sums in another order."""

TENSOR_TOLERANCE = 1e-2
"""Tolerance relative to a tensor's L2 norm. If a gradient is near 0, adaptive optimizers amplify its last bits."""


@dataclass(frozen=True)
class Outcome:
    """The losses and positions of a run by step, from 1, and its last checkpoint."""

    losses: list[float | None]
    positions: list[int]
    state: StateDict


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison."""

    name: str
    exact: bool  # compared bit for bit, otherwise with a tolerance
    steps: int  # number of compared losses
    tensors: int  # number of compared tensors
    loss: float  # largest relative difference of a loss
    tensor: float  # largest difference of a tensor, relative to its norm
    first: str | None  # the first difference beyond the tolerance; None if there is none


def compare(name: str, found: Outcome, wanted: Outcome, *, exact: bool) -> Comparison:
    """Compare losses, positions and the last state of two runs of the same steps."""
    differences = [_relative(a, b) for a, b in zip(found.losses, wanted.losses, strict=False)]
    # Residuals of compression depend on the world size.
    tensors = dict(_tensors(found, wanted, ("model", "optimizer", *(["exchange"] if exact else []))))
    most = 0.0 if exact else LOSS_TOLERANCE
    first = _first_step(found, wanted, differences, most)
    if first is None:
        most = 0.0 if exact else TENSOR_TOLERANCE
        first = next((_tensor_text(key, how, most) for key, how in sorted(tensors.items()) if not how <= most), None)
    if first is None and exact:
        first = _first_value(found.state.values, wanted.state.values)
    return Comparison(
        name, exact, len(differences), len(tensors), max(differences, default=0.0), max(tensors.values()), first
    )


def _first_step(found: Outcome, wanted: Outcome, differences: list[float], most: float) -> str | None:
    for step, (a, b) in enumerate(zip(found.positions, wanted.positions, strict=False), 1):
        if a != b:
            return f"step {step} ended at position {a} instead of {b}"
    if len(found.positions) != len(wanted.positions):
        return f"{len(found.positions)} steps instead of {len(wanted.positions)}"
    for step, how in enumerate(differences, 1):
        if not how <= most:
            return f"step {step}: loss {found.losses[step - 1]!r} instead of {wanted.losses[step - 1]!r}"
    return None


def _tensor_text(name: str, how: float, most: float) -> str:
    return f"tensor {name}: differs by {how:.3g} of its norm" + (f", more than {most:g}" if most else "")


def _first_value(found: Mapping[str, Any], wanted: Mapping[str, Any], prefix: str = "") -> str | None:
    for name in sorted(found.keys() | wanted.keys()):
        a, b = found.get(name), wanted.get(name)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            inner = _first_value(a, b, f"{prefix}{name}.")
            if inner is not None:
                return inner
        elif a != b:
            return f"{prefix}{name} is {str(a)[:60]} instead of {str(b)[:60]}"
    return None


def _tensors(found: Outcome, wanted: Outcome, groups: Sequence[str]) -> Iterator[tuple[str, float]]:
    ours, theirs = found.state.tensors, wanted.state.tensors
    for group in groups:
        a, b = ours.get(group, {}), theirs.get(group, {})
        for name in a.keys() | b.keys():
            yield f"{group}: {name}", _distance(a.get(name), b.get(name))


def _distance(a: Tensor | None, b: Tensor | None) -> float:
    """Return the distance relative to the L2 norm of `b`: 0 only for equal bits, inf for other shapes or dtypes."""
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
