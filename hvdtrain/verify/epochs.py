"""Check that ranks used the samples of their positions, and each sample of an epoch exactly once."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.order import SampleOrder
from hvdtrain.state.ledger import StartHeader
from hvdtrain.verify.coverage import Rows, Wrong
from hvdtrain.verify.starts import Ints, Window

_POSITIONS_AT_ONCE = 1 << 18


@dataclass(frozen=True)
class Epoch:
    """The samples used of an epoch."""

    number: int  # counted from 0, by the number of samples that the data, or this source of it, had then
    samples: int
    used: int
    distinct: int  # number of different samples used
    left_out: int  # samples skipped on purpose
    is_last: bool = False  # the run may still be in this epoch
    source: int = 0  # counted from 1; 0 if the data has no weights


class Epochs:
    """Counts the used samples of each epoch, in the order of the stream. A change of data or seed begins a new epoch.

    With weights, each source has its own epochs.
    """

    def __init__(self) -> None:
        self.whole = 0  # epochs in which each sample was used exactly once
        self.others: list[Epoch] = []
        self.reordered = 0  # changes of data or seed, which change the order
        self.iterable = 0  # samples of iterable data sets: their epochs are not known
        self._key: tuple[int, list[list[int]], int, str] | None = None
        self._open: dict[int, _OpenEpoch] = {}

    def add(self, header: StartHeader, positions: Ints, indices: Ints) -> None:
        """Add samples by their positions and indices, in the order that `header` describes."""
        key = (header.samples, header.sources, header.seed, header.data_id)
        if key != self._key:
            self.close()
            self.reordered += self._key is not None
            self._key = key
        if not header.samples:
            self.iterable += len(positions)
            return
        order = order_of(header)
        sources, ranks = order.split(positions)
        begin, end = 0, int(positions.max(initial=-1))  # what is skipped later is not skipped yet
        for source, (length, _) in enumerate(order.parts):
            own = sources == source
            left_out = [[order.count(source, at) for at in each] for each in header.left_out if each[0] <= end]
            self._add(source, length, left_out, ranks[own], indices[own] - begin)
            begin += length

    def _add(self, source: int, length: int, left_out: list[list[int]], positions: Ints, indices: Ints) -> None:
        if source in self._open:
            self._open[source].count_left_out(left_out)
        numbers = positions // length
        cuts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
        for low, high in pairwise(cuts):
            if low < high:
                number = int(numbers[low])
                if source not in self._open or self._open[source].number != number:
                    self._close(source)
                    self._open[source] = _OpenEpoch(number, np.zeros(length, np.bool_))
                epoch = self._open[source]
                epoch.seen[indices[low:high]] = True
                epoch.used += high - low
                epoch.count_left_out(left_out)

    def close(self, *, is_last: bool = False) -> None:
        """End the current epochs. `is_last`: the run may still be in them."""
        for source in sorted(self._open):
            self._close(source, is_last=is_last)

    def _close(self, source: int, *, is_last: bool = False) -> None:
        counted = self._open.pop(source, None)
        if counted is None:
            return
        length, distinct = len(counted.seen), int(counted.seen.sum())
        if counted.used == distinct == length:
            self.whole += 1
        else:
            number = source + 1 if self._key is not None and self._key[1] else 0
            counts = (counted.used, distinct, counted.left_out)
            self.others.append(Epoch(counted.number, length, *counts, is_last, source=number))


@dataclass
class _OpenEpoch:
    number: int
    seen: NDArray[np.bool_]
    used: int = 0
    left_out: int = 0

    def count_left_out(self, ranges: list[list[int]]) -> None:
        length = len(self.seen)
        begin, end = self.number * length, (self.number + 1) * length
        self.left_out = sum(max(0, min(end, high) - max(begin, low)) for low, high in ranges)


def order_of(header: StartHeader) -> SampleOrder:
    """Return the order of samples that a header describes."""
    return SampleOrder(header.samples, header.sources, header.seed)


def check_samples(window: Window, rows: Rows, epochs: Epochs) -> Wrong | None:
    """Find the first step in which a rank used other samples than those of its positions. Add the samples to `epochs`.

    Every rank has recorded the steps of the window, and each position is once in `rows`.
    """
    header, origin = window.start.header, int(rows.begins[0])
    indices = order_of(header).indices(np.arange(origin, int(rows.ends[-1]))).astype("<i8")
    data = memoryview(indices.tobytes())
    errors = [_differing(window, rank, data, origin) for rank in window.start.entries]
    found = min(filter(None, errors), key=lambda w: w.step, default=None)
    if found is None:
        used = _positions(rows.begins, rows.ends)
        epochs.add(header, used, indices[used - origin])
    return found


def parts(window: Window) -> Iterator[Window]:
    """Split a window into some steps each, so that memory does not grow with the run."""
    each = max(1, _POSITIONS_AT_ONCE // window.start.header.global_batch)
    for first in range(window.first, window.last, each):
        yield replace(window, first=first, last=min(first + each, window.last))


def _differing(part: Window, rank: int, data: memoryview, origin: int) -> Wrong | None:
    entries = part.entries(rank)
    first = entries.first.tolist()
    begins = ((entries.begins - origin) * 8).tolist()
    ends = ((entries.ends - origin) * 8).tolist()
    crc32 = zlib.crc32
    for number, wanted in enumerate(entries.checksums.tolist()):
        found = 0
        for row in range(first[number], first[number + 1]):
            found = crc32(data[begins[row] : ends[row]], found)
        if found != wanted:
            own = slice(first[number], first[number + 1])
            ranges = zip(entries.begins[own], entries.ends[own], strict=True)
            text = ", ".join(f"{a} to {b - 1}" for a, b in ranges) or "no position"
            step = int(entries.steps[number])
            return Wrong(step, f"step {step}: rank {rank} used other samples than those of its position(s) {text}")
    return None


def _positions(begins: Ints, ends: Ints) -> Ints:
    """Return all positions in sorted ranges."""
    lengths = ends - begins
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)[:-1]])
    return np.repeat(begins - before, lengths) + np.arange(int(lengths.sum()))
