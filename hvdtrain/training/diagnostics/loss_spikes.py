"""Detect losses that jump, compared with those of the steps before."""

from __future__ import annotations

import math
from collections.abc import Sequence

WINDOW = 64
"""Steps that a loss is compared with."""

_LEAST = 24
"""Steps before the first report."""

_DEVIATIONS = 8.0
_SMALLEST = 0.01
"""Smallest deviation, as a share of the median, so that a curve without noise is not all spikes."""

_QUIET = 8
"""Steps without a spike before the next one counts as new."""

KEEP = WINDOW + _QUIET
"""Losses that `detect_spike` needs."""


def detect_spike(before: Sequence[float], loss: float) -> float | None:
    """Return the expected loss if the loss jumped; None if it did not, or if that was already reported.

    Compares with the median, in median absolute deviations, which a few spikes in the window do not change. If all
    losses are positive, the logarithm must stand out too: the noise of small batches is skewed, its logarithm less so.

    Args:
        before: losses of applied steps, the newest last; `KEEP` of them are enough.
        loss: of the next step.
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
    deviation = 1.4826 * deviations[len(deviations) // 2]  # the standard deviation, for a normal distribution
    return loss - median > _DEVIATIONS * max(deviation, least)
