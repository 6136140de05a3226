"""The order of samples in the endless stream over epochs, of one source or of several with weights.

Pure functions of the config. Only `rank_share` and `Workers` depend on the number of ranks. They divide micro-batches
among them; these have fixed boundaries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from hvdtrain.config.sync import apportion

T = TypeVar("T")
_ROUNDS = 6
_MASK = 0xFFFFFFFFFFFFFFFF

Int64s = NDArray[np.int64]


@dataclass(frozen=True)
class MicroBatch:
    """Positions [start, stop) of the stream, counted from the start of training, that share a forward pass."""

    start: int
    stop: int


def micro_batches(ranges: Sequence[tuple[int, int]], micro_batch: int, rank: int, size: int) -> list[MicroBatch]:
    """Return the micro-batches of a rank, of those that `ranges` [begin, end) of positions are divided into.

    The last one of a range may be shorter. The cost does not grow with the number of ranks.
    """
    return take_micro_batches(ranges, micro_batch, rank_share(count_micro_batches(ranges, micro_batch), rank, size))


def count_micro_batches(ranges: Sequence[tuple[int, int]], micro_batch: int) -> int:
    """Return the number of micro-batches that `ranges` are divided into."""
    return sum(len(range(begin, end, micro_batch)) for begin, end in ranges)


def take_micro_batches(ranges: Sequence[tuple[int, int]], micro_batch: int, share: range) -> list[MicroBatch]:
    """Return those with the indices `share`, which may have gaps."""
    starts = [range(begin, end, micro_batch) for begin, end in ranges]
    batches: list[MicroBatch] = []
    first = 0
    for (_, end), all_of_range in zip(ranges, starts, strict=True):
        begin = max(share.start, share.start - (share.start - first) // share.step * share.step) - first
        own = all_of_range[begin : max(share.stop - first, 0) : share.step]
        batches += [MicroBatch(start, min(start + micro_batch, end)) for start in own]
        first += len(all_of_range)
    return batches


def positions_without(position: int, count: int, left_out: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Return the next `count` (1 or more) positions from `position` on, as ranges [begin, end).

    Those in `left_out`, ranges [begin, end) in order without overlap, are skipped.
    """
    found: list[tuple[int, int]] = []
    for begin, end in left_out:
        if end <= position:
            continue
        before = min(count, begin - position)
        if before > 0:
            found.append((position, position + before))
            count -= before
        if not count:
            return found
        position = end
    return [*found, (position, position + count)]


def rank_share(count: int, rank: int, size: int) -> range:
    """Return the indices of `rank`, of `count` in order. Shares differ by at most one, and the first are larger.

    So rank 0, which measures the time of a step, does not idle.
    """
    each, more = divmod(count, size)
    start = rank * each + min(rank, more)
    return range(start, start + each + (rank < more))


def even_options(global_batch: int, micro_batch: int, ranks: int) -> str:
    """Return the options next to these with which all ranks have equally many micro-batches."""
    unit = micro_batch * ranks
    ways = [f"--train.global_batch {max(1, round(global_batch / unit)) * unit}"]
    smaller = (size for size in range(micro_batch, 0, -1) if -(-global_batch // size) % ranks == 0)
    if size := next(smaller, 0):
        ways.append(f"--train.micro_batch {size}, which changes no result")
    return " or ".join(ways)


def sample_indices(positions: NDArray[np.int64], length: int, seed: int) -> NDArray[np.int64]:
    """Return the indices into the data set at `positions`. Every epoch of `length` positions is a permutation.

    Shapes: (N,) -> (N,). The permutation is computed, not stored: a Feistel network over the smallest even number of
    bits for `length`, applied until the value is below `length` (Black and Rogaway, Ciphers with arbitrary finite
    domains, 2002).
    """
    epochs, offsets = np.divmod(positions.astype(np.int64), length)
    indices = np.empty_like(offsets)
    half = np.uint64(max(1, (max(length - 1, 1).bit_length() + 1) // 2))
    for epoch in np.unique(epochs):
        is_in_epoch, key = epochs == epoch, mix_seed(seed, int(epoch))
        keys = [np.uint64(mix_seed(key, round_)) for round_ in range(_ROUNDS)]
        values = _feistel(offsets[is_in_epoch].astype(np.uint64), half, keys)
        while (outside := values >= length).any():
            values[outside] = _feistel(values[outside], half, keys)
        indices[is_in_epoch] = values.astype(np.int64)
    return indices


def mix_seed(seed: int, value: T) -> T:
    """Return a 63-bit hash of (seed, value) by splitmix64 (Steele et al., 2014), for an int or an array of uint64."""
    return cast("T", _splitmix(_splitmix(seed & _MASK) ^ (cast("Any", value) & _MASK)) >> 1)


def _feistel(values: NDArray[np.uint64], half: np.uint64, keys: list[np.uint64]) -> NDArray[np.uint64]:
    mask = np.uint64((1 << int(half)) - 1)
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (_splitmix(right ^ key) & mask)
    joined: NDArray[np.uint64] = (left << half) | right
    return joined


def _splitmix(x: T) -> T:
    """Hash 64-bit numbers: one int, for which numpy takes ten times as long, or an array of uint64."""
    number: Any = x
    z = (number + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    mixed: T = z ^ (z >> 31)
    return mixed


@dataclass(frozen=True)
class SampleOrder:
    """The order of samples in the endless stream.

    With weights, sources take turns in a fixed pattern, which repeats after as many positions as the weights sum up to.
    Among any first n samples, the number of those of a source differs by less than 1 from n times its share. Each
    source has its own passes: it is used whole, in a random order, before one of its samples is used again.
    """

    samples: int  # number of samples of all sources; 0 for an iterable data set, in its own order
    sources: Sequence[Sequence[int]]  # length and whole weight of each; empty for one order over all samples
    seed: int  # of the order

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


@dataclass(frozen=True)
class Workers:
    """`count` workers, which `ranks` ranks serve.

    With fewer ranks than workers, a rank serves consecutive workers, one after the other. With more ranks than workers,
    consecutive ranks serve a worker together. `parts` are the workers' shares of each step's micro-batches; without
    them, shares are equal.
    """

    count: int
    ranks: int
    parts: tuple[int, ...] = ()

    def served_by(self, rank: int) -> range:
        """Return the workers that a rank serves."""
        if self.ranks <= self.count:
            return rank_share(self.count, rank, self.ranks)
        worker = _holder(rank, self.ranks, self.count)
        return range(worker, worker + 1)

    @property
    def most_served(self) -> int:
        """Number of workers that the rank serves which serves the most."""
        return max(len(self.served_by(rank)) for rank in range(self.ranks))

    def ranks_of(self, worker: int) -> range:
        """Return the ranks that serve a worker; the first is its leader."""
        if self.ranks > self.count:
            return rank_share(self.ranks, worker, self.count)
        rank = _holder(worker, self.count, self.ranks)
        return range(rank, rank + 1)

    def leaders(self) -> list[int]:
        """Return the ranks that exchange the changes of workers."""
        return sorted({self.ranks_of(worker)[0] for worker in range(self.count)})

    def groups(self) -> list[list[int]]:
        """Return the ranks of each communicator besides that of all: of the workers, then that of the leaders."""
        if self.ranks <= self.count:
            return []
        served = [list(self.ranks_of(worker)) for worker in range(self.count)]
        return [ranks for ranks in [*served, self.leaders()] if len(ranks) > 1]

    def shares(self, micro_batches: int, rank: int) -> list[range]:
        """Return which of a step's micro-batches a rank runs, for each worker that it serves."""
        found, counts = [], apportion(micro_batches, self.parts or (1,) * self.count)
        for worker in self.served_by(rank):
            start, ranks = sum(counts[:worker]), self.ranks_of(worker)
            part = rank_share(counts[worker], rank - ranks.start, len(ranks))
            found.append(range(start + part.start, start + part.stop))
        return found


def _holder(index: int, count: int, size: int) -> int:
    """Return the rank that has `index` in its `rank_share`."""
    each, more = divmod(count, size)
    larger = more * (each + 1)
    return index // (each + 1) if index < larger else more + (index - larger) // each
