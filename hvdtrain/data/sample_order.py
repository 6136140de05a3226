"""The order of samples from one source, or from several sources with weights: a pure function of the config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.order import mix_seed, sample_indices

Int64s = NDArray[np.int64]


@dataclass(frozen=True)
class SampleOrder:
    """The order of samples in the endless stream.

    With weights, sources take turns in a fixed pattern, which repeats after as many positions as the weights sum up to.
    Among any first n samples, the number of those of a source differs by less than 1 from n times its share. Each
    source has its own passes: it is used whole, in a random order, before one of its samples is used again.

    Args:
        samples: number of samples of all sources; 0 for an iterable data set, in its own order.
        sources: length and weight, a whole number of 1 or more, of each source; empty for one order over all samples.
        seed: of the order.
    """

    samples: int
    sources: Sequence[Sequence[int]]
    seed: int

    @property
    def parts(self) -> Sequence[Sequence[int]]:
        """Length and weight of each source; of all samples if there are no weights."""
        return self.sources or [[self.samples, 1]]

    @property
    def epoch_samples(self) -> int:
        """Number of samples of an epoch: until each source has been used whole at least once. 0 if not known."""
        if not self.samples:
            return 0
        turns, before = mixing_pattern(tuple(weight for _, weight in self.parts))
        last = 0
        for source, (length, weight) in enumerate(self.parts):
            periods, rest = divmod(length - 1, weight)
            turn = int(np.flatnonzero((turns == source) & (before == rest))[0])
            last = max(last, periods * len(turns) + turn)
        return last + 1

    def split(self, positions: Int64s) -> tuple[Int64s, Int64s]:
        """Return the source of each position, and the number of its samples before that position. Shapes: (N,)."""
        weights = tuple(weight for _, weight in self.parts)
        turns, before = mixing_pattern(weights)
        periods, rest = np.divmod(positions, len(turns))
        sources = turns[rest]
        return sources, periods * np.array(weights, np.int64)[sources] + before[rest]

    def count(self, source: int, position: int) -> int:
        """Return the number of samples of a source before a position."""
        weights = tuple(weight for _, weight in self.parts)
        periods, rest = divmod(position, sum(weights))
        return periods * weights[source] + int((mixing_pattern(weights)[0][:rest] == source).sum())

    def indices(self, positions: Int64s) -> Int64s:
        """Return the indices of the samples at `positions`, counted over all sources in order. Shapes: (N,) -> (N,)."""
        if not self.samples:
            return positions
        if not self.sources:
            return sample_indices(positions, self.samples, self.seed)
        sources, ranks = self.split(positions)
        indices = np.empty_like(positions)
        begin = 0
        for source, (length, _) in enumerate(self.sources):
            own = sources == source
            indices[own] = begin + sample_indices(ranks[own], length, mix_seed(self.seed, source))
            begin += length
        return indices


@lru_cache(maxsize=8)
def mixing_pattern(weights: tuple[int, ...]) -> tuple[Int64s, Int64s]:
    """Return the source of each turn of a period, and the number of its turns before. Shapes: (sum(weights),).

    Turn j of a source with share r is between floor(j / r) and ceil((j + 1) / r), so no count is off by 1. The
    earliest deadline goes first, which meets all of them (Baruah et al., Proportionate progress, Algorithmica 1996).
    """
    period = sum(weights)
    used = [0] * len(weights)
    turns, before = np.empty(period, np.int64), np.empty(period, np.int64)
    for turn in range(period):
        ready = [s for s, weight in enumerate(weights) if used[s] * period < (turn + 1) * weight]
        source = min(ready, key=lambda s: (-(-(used[s] + 1) * period // weights[s]), s))
        turns[turn], before[turn] = source, used[source]
        used[source] += 1
    return turns, before
