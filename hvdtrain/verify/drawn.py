"""Whether the samples that were drawn are those of their positions, and each of an epoch exactly once."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.order import samples
from hvdtrain.state.ledger import StartHeader
from hvdtrain.verify.coverage import Rows, Wrong, bounds
from hvdtrain.verify.starts import Window

_POSITIONS_AT_ONCE = 1 << 18


@dataclass(frozen=True)
class Epoch:
    """What was taken of an epoch.

    Attributes:
        number: counted from 0, by the number of samples that the data had then.
        samples: in an epoch.
        taken: of them.
        distinct: of those that were taken.
        left_out: on purpose.
        is_last: the run may still be in it.
    """

    number: int
    samples: int
    taken: int
    distinct: int
    left_out: int
    is_last: bool = False

    @property
    def is_whole(self) -> bool:
        """Each sample exactly once."""
        return self.taken == self.distinct == self.samples


class Epochs:
    """Adds up what is taken, in the order of the stream. A change of data, seed or epoch begins another one.

    Attributes:
        whole: epochs of which each sample was taken exactly once.
        others: the rest.
        reordered: how often data or seed, and with them the order, were changed.
    """

    def __init__(self) -> None:
        self.whole = 0
        self.others: list[Epoch] = []
        self.reordered = 0
        self._order: tuple[int, int, str] | None = None
        self._key: tuple[int, int, int, str] | None = None
        self._seen = np.zeros(0, np.bool_)
        self._taken = self._left_out = 0

    def add(self, head: StartHeader, positions: NDArray[np.int64], indices: NDArray[np.int64]) -> None:
        """Samples that were taken, and their indices; by the order of `head`."""
        numbers = positions // head.samples
        cuts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
        for low, high in pairwise(cuts):
            if low < high:
                self._begin(head, int(numbers[low]))
                self._seen[indices[low:high]] = True
                self._taken += high - low

    def end(self) -> None:
        """No more comes."""
        self._close(is_last=True)

    def _begin(self, head: StartHeader, number: int) -> None:
        key = (number, head.samples, head.seed, head.data_id)
        if key == self._key:
            return
        self._close()
        self.reordered += self._order not in (None, key[1:])
        self._key, self._order = key, key[1:]
        self._seen = np.zeros(head.samples, np.bool_)
        self._taken = 0
        low, high = number * head.samples, (number + 1) * head.samples
        self._left_out = sum(max(0, min(high, end) - max(low, begin)) for begin, end in head.left_out)

    def _close(self, *, is_last: bool = False) -> None:
        if self._key is None:
            return
        number, length, _, _ = self._key
        epoch = Epoch(number, length, self._taken, int(self._seen.sum()), self._left_out, is_last)
        self._key = None
        if epoch.is_whole:
            self.whole += 1
        else:
            self.others.append(epoch)


def check_drawn(window: Window, rows: Rows, epochs: Epochs) -> Wrong | None:
    """The first step for which a rank drew other samples than those of its positions; the epochs are added up.

    Args:
        window: whose steps every rank tells of.
        rows: its ranges, each position once.
        epochs: changed.
    """
    head = window.start.head
    for part, low, high in _parts(window, rows):
        origin = int(rows.begins[low])
        indices = samples(np.arange(origin, int(rows.ends[high - 1])), head.samples, head.seed).astype("<i8")
        data = memoryview(indices.tobytes())
        wrong = [_differing(part, rank, data, origin) for rank in window.start.entries]
        found = min(filter(None, wrong), key=lambda w: w.step, default=None)
        if found is not None:
            return found
        taken = _taken(rows.begins[low:high], rows.ends[low:high])
        epochs.add(head, taken, indices[taken - origin])
    return None


def _parts(window: Window, rows: Rows) -> Iterator[tuple[Window, int, int]]:
    """The window in pieces of some steps, with which rows are theirs."""
    each = max(1, _POSITIONS_AT_ONCE // window.start.head.global_batch)
    for first in range(window.first, window.last, each):
        last = min(first + each, window.last)
        low, high = np.searchsorted(rows.steps, [first, last], side="right")
        yield replace(window, first=first, last=last), int(low), int(high)


def _differing(part: Window, rank: int, data: memoryview, origin: int) -> Wrong | None:
    entries = part.start.entries[rank]
    low, high = bounds(part, rank)
    first = entries.first[low : high + 1].tolist()
    begins = ((entries.begins[first[0] : first[-1]] - origin) * 8).tolist()
    ends = ((entries.ends[first[0] : first[-1]] - origin) * 8).tolist()
    wanted = entries.checksums[low:high].tolist()
    crc32, base = zlib.crc32, first[0]
    for number, checksum in enumerate(wanted):
        found = 0
        for row in range(first[number] - base, first[number + 1] - base):
            found = crc32(data[begins[row] : ends[row]], found)
        if found != checksum:
            where = [(a // 8 + origin, b // 8 + origin) for a, b in zip(begins, ends, strict=True)]
            mine = where[first[number] - base : first[number + 1] - base]
            text = ", ".join(f"{a} to {b - 1}" for a, b in mine) or "no position"
            step = int(entries.steps[low + number])
            return Wrong(step, f"step {step}: rank {rank} drew other samples than those of its position(s) {text}")
    return None


def _taken(begins: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Positions of ranges that are in order."""
    lengths = ends - begins
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)[:-1]])
    return np.repeat(begins - before, lengths) + np.arange(int(lengths.sum()))
