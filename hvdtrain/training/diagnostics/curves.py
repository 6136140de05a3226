"""Jumps of the loss and of the gradient norm, and a loss that rises slowly. Pure.

Change point libraries such as ruptures are not used: a step is judged when it ends, from the steps before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median as median_of
from typing import Literal

WINDOW = 64
"""Steps that a value is compared with."""

_LEAST = 24
"""Steps before the first report."""

_DEVIATIONS = 8.0
_SMALLEST = 0.01
"""Smallest deviation, as a share of the median, so that a curve without noise is not all spikes."""

_QUIET = 8
"""Steps without a spike before the next one counts as new."""

KEEP = WINDOW + _QUIET
"""Values that `detect_jump` needs."""

_RISES = 4.0
"""Deviations of the mean of a window, of about an eighth of those of its values."""
_IN_A_ROW = 3

Direction = Literal["up", "down"]


def detect_jump(before: Sequence[float], value: float, direction: Direction = "up") -> float | None:
    """Return the expected value if a value jumped; None if it did not, or if that was already reported.

    A jump is a distance from the median, in median absolute deviations; a few earlier jumps hardly change either. If
    all values are positive, their logarithms must jump too, because they are less skewed than losses of small batches.

    Args:
        before: values of applied steps, the newest last; `KEEP` of them are enough.
        value: of the next step.
        direction: of the jump.
    """
    before = list(before)
    expected = _jumped(before[-WINDOW:], value, direction)
    if expected is None:
        return None
    for back in range(1, min(_QUIET, len(before)) + 1):
        if _jumped(before[-back - WINDOW : -back], before[-back], direction) is not None:
            return None
    return expected


def _jumped(window: Sequence[float], value: float, direction: Direction) -> float | None:
    if len(window) < _LEAST:
        return None
    ordered = sorted(window)
    median = ordered[len(ordered) // 2]
    sign = 1 if direction == "up" else -1
    if sign * (value - median) <= _DEVIATIONS * _SMALLEST * abs(median):  # nearly always
        return None
    found = _stands_out(ordered, median, value, _SMALLEST * abs(median))
    if found and ordered[0] > 0 and value > 0:
        found = _stands_out([math.log(x) for x in ordered], math.log(median), math.log(value), _SMALLEST)
    return median if found else None


def _stands_out(window: Sequence[float], median: float, value: float, least: float) -> bool:
    return abs(value - median) > _DEVIATIONS * max(_deviation(window, median), least)


def _deviation(values: Sequence[float], median: float) -> float:
    """Return the standard deviation, for a normal distribution, from the median absolute deviation."""
    return 1.4826 * median_of(abs(x - median) for x in values)


@dataclass
class Rise:
    """Detects a loss that rises slowly: medians of windows, each certainly above the lowest one before.

    A rise is reported once, until a window is lower than the lowest again.
    """

    _values: list[float] = field(default_factory=list)
    _lowest: tuple[int, float, float] = (0, math.inf, 0.0)
    _above: int = 0

    def add(self, step: int, value: float) -> tuple[int, float, float] | None:
        """Return since which step a loss rises, its median then and now, if that is new."""
        self._values.append(value)
        if len(self._values) < WINDOW:
            return None
        median = median_of(self._values)
        deviation = max(_deviation(self._values, median), _SMALLEST * abs(median))
        self._values.clear()
        first, lowest, spread = self._lowest
        if median < lowest:
            self._lowest, self._above = (step, median, deviation), 0
            return None
        error = math.hypot(spread, deviation) * 1.2533 / math.sqrt(WINDOW)
        self._above = self._above + 1 if median - lowest > _RISES * error else min(self._above, _IN_A_ROW)
        return (first, lowest, median) if self._above == _IN_A_ROW else None
