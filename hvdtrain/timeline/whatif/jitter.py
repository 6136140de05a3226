"""The expected time that ranks wait for the slowest one, because their computing times differ by step. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_TAIL = 0.1
"""Share of the deviations that the tail is fitted to."""
_WINDOW = 9
"""Steps. Their median is the part of a deviation that lasts."""
_EULER = 0.5772156649
_MIN_FOR_TAIL = 20
"""Deviations below which no tail is fitted."""


@dataclass(frozen=True)
class Jitter:
    """The deviations of a rank's computing time from its mean: seconds, ascending, of all ranks and steps."""

    deviations: NDArray[np.float64]

    @classmethod
    def from_times(cls, compute_s: NDArray[np.float64]) -> Jitter:
        """Return the jitter of computing times [ranks, steps].

        A deviation that all ranks share makes no rank wait, so it is removed. If there is one rank, the median of the
        steps around a step takes its place.
        """
        if compute_s.size == 0:
            return cls(np.zeros(1))
        kept = np.atleast_2d(compute_s)
        if kept.shape[0] == 1:
            padded = np.pad(kept[0], _WINDOW // 2, mode="reflect" if kept.size > _WINDOW else "edge")
            kept = kept - np.median(np.lib.stride_tricks.sliding_window_view(padded, _WINDOW), axis=1)
        else:
            ranks = kept.shape[0]
            # The mean over n ranks holds 1/n of a rank's own deviation; the factor restores it.
            kept = (kept - kept.mean(axis=0)) * math.sqrt(ranks / (ranks - 1))
        kept = kept - kept.mean(axis=1, keepdims=True)
        return cls(np.sort(kept.ravel()))

    def expected_maximum_s(self, ranks: int) -> float:
        """Return how much later than an average rank the slowest of `ranks` is, in seconds."""
        m = len(self.deviations)
        if ranks <= 1 or m < 2:
            return 0.0
        # E[max of n] of the empirical distribution: sum of x_(i) ((i/m)^n - ((i-1)/m)^n).
        steps = (np.arange(m + 1) / m) ** ranks
        measured = float(self.deviations @ np.diff(steps))
        return max(measured, self._tail_s(ranks))

    def reaches(self, ranks: int) -> bool:
        """Whether there are as many deviations as ranks. If not, the tail is extrapolated."""
        return ranks <= len(self.deviations)

    def _tail_s(self, ranks: int) -> float:
        """Return the expected maximum of an exponential tail above the 90th percentile: u + b (ln(p n) + gamma).

        Pickands, 1975, with shape 0.
        """
        m = len(self.deviations)
        if m < _MIN_FOR_TAIL or self.reaches(ranks):
            return 0.0
        threshold = float(np.quantile(self.deviations, 1 - _TAIL))
        above = self.deviations[self.deviations > threshold] - threshold
        if not len(above):
            return 0.0
        return threshold + float(above.mean()) * (math.log(ranks * _TAIL) + _EULER)
