"""Losses that jump out of what the steps before them were like."""

from __future__ import annotations

import math
from collections.abc import Sequence

WINDOW = 64
"""Steps that a loss is measured against."""

_LEAST = 24
"""Steps before anything is said."""

_DEVIATIONS = 8.0
_SMALLEST = 0.01
"""Deviations count as this share of the median at least, so that a curve without noise is not all spikes."""

_QUIET = 8
"""A spike is a new one only after so many steps without."""

KEEP = WINDOW + _QUIET
"""Losses that `spike` looks back on."""


def spike(before: Sequence[float], loss: float) -> float | None:
    """What the loss was expected to be, if it jumped; None where it did not, or where that was said already.

    Robust: against the median, in median absolute deviations, which a few spikes in the window do not move. Where all
    losses are positive it must stand out by ratio too: a few samples at a time make noise that is skewed, and its
    logarithm much less so.

    Args:
        before: losses of the steps that were applied, the newest last; `KEEP` of them are enough.
        loss: of the step after them.
    """
    expected = _jumped(before[-WINDOW:], loss)
    if expected is None:
        return None
    for back in range(1, min(_QUIET, len(before)) + 1):
        if _jumped(before[-back - WINDOW : -back], before[-back]) is not None:
            return None
    return expected


def _jumped(window: Sequence[float], loss: float) -> float | None:
    if len(window) < _LEAST:
        return None
    ordered = sorted(window)
    median = ordered[len(ordered) // 2]
    if loss <= median + _DEVIATIONS * _SMALLEST * abs(median):  # nearly always
        return None
    found = _stands_out(ordered, median, loss, _SMALLEST * abs(median))
    if found and ordered[0] > 0:
        found = _stands_out([math.log(x) for x in ordered], math.log(median), math.log(loss), _SMALLEST)
    return median if found else None


def _stands_out(window: Sequence[float], median: float, loss: float, least: float) -> bool:
    deviations = sorted(abs(x - median) for x in window)
    deviation = 1.4826 * deviations[len(deviations) // 2]  # of a normal distribution, its standard deviation
    return loss - median > _DEVIATIONS * max(deviation, least)
