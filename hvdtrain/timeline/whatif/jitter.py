"""Ranks are not equally fast in every step, and a step takes as long as its slowest: the expected maximum. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_TAIL = 0.1
"""Share of the deviations that the tail is fitted to."""
_AROUND = 9
"""Steps: of which the median is what lasts."""
_EULER = 0.5772156649
_LEAST = 20
"""Deviations below which nothing is fitted to a tail."""


@dataclass(frozen=True)
class Jitter:
    """By how much a rank's computing differs from what it is in the middle, step by step.

    Attributes:
        deviations: seconds, ascending, of all ranks and steps; their mean is 0.
    """

    deviations: NDArray[np.float64]

    @classmethod
    def of(cls, compute_s: NDArray[np.float64]) -> Jitter:
        """Of what steps took on each rank [ranks, steps].

        What all ranks have in common in a step is taken away: it makes nobody wait. Of one rank alone it is told
        apart by its lasting: what the steps around it have too.
        """
        if compute_s.size == 0:
            return cls(np.zeros(1))
        kept = np.atleast_2d(compute_s)
        if kept.shape[0] == 1:
            kept = kept - _around(kept[0])
        else:
            ranks = kept.shape[0]
            # The mean over n ranks holds 1/n of a rank's own deviation, which this gives back.
            kept = (kept - kept.mean(axis=0)) * math.sqrt(ranks / (ranks - 1))
        kept = kept - kept.mean(axis=1, keepdims=True)
        return cls(np.sort(kept.ravel()))

    def expected_maximum_s(self, ranks: int) -> float:
        """Seconds by which the slowest of so many ranks is behind one of them on average."""
        m = len(self.deviations)
        if ranks <= 1 or m < 2:
            return 0.0
        # E[max of n] of the empirical distribution: sum of x_(i) ((i/m)^n - ((i-1)/m)^n).
        steps = (np.arange(m + 1) / m) ** ranks
        seen = float(self.deviations @ np.diff(steps))
        return max(seen, self._tail_s(ranks))

    def reaches(self, ranks: int) -> bool:
        """Whether as many deviations were seen as there are ranks: beyond, the tail is extrapolated."""
        return ranks <= len(self.deviations)

    def _tail_s(self, ranks: int) -> float:
        """By an exponential tail above the 90th percentile (Pickands, 1975, with shape 0): u + b (ln(p n) + gamma)."""
        m = len(self.deviations)
        if m < _LEAST or self.reaches(ranks):
            return 0.0
        threshold = float(np.quantile(self.deviations, 1 - _TAIL))
        above = self.deviations[self.deviations > threshold] - threshold
        if not len(above):
            return 0.0
        return threshold + float(above.mean()) * (math.log(ranks * _TAIL) + _EULER)


def _around(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The median of the steps around each."""
    padded = np.pad(values, _AROUND // 2, mode="reflect" if len(values) > _AROUND else "edge")
    found: NDArray[np.float64] = np.median(np.lib.stride_tricks.sliding_window_view(padded, _AROUND), axis=1)
    return found
