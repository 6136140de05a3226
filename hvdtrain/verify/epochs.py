"""Check that ranks used the samples of their positions, and each sample of an epoch exactly once."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.order import sample_indices
from hvdtrain.state.ledger import StartHeader
from hvdtrain.verify.coverage import Rows, Wrong
from hvdtrain.verify.starts import Window

_POSITIONS_AT_ONCE = 1 << 18


@dataclass(frozen=True)
class Epoch:
    """The samples used of an epoch.

    Attributes:
        number: counted from 0, by the number of samples that the data had then.
        distinct: number of different samples used.
        left_out: samples skipped on purpose.
        is_last: the run may still be in this epoch.
    """

    number: int
    samples: int
    used: int
    distinct: int
    left_out: int
    is_last: bool = False


class Epochs:
    """Counts the used samples of each epoch, in the order of the stream. A change of data or seed begins a new epoch.

    Attributes:
        whole: number of epochs in which each sample was used exactly once.
        others: the other epochs.
        reordered: number of changes of data or seed, which change the order.
    """

    def __init__(self) -> None:
        self.whole = 0
        self.others: list[Epoch] = []
        self.reordered = 0
        self._order: tuple[int, int, str] | None = None
        self._key: tuple[int, int, int, str] | None = None
        self._seen = np.zeros(0, np.bool_)
        self._used = self._left_out = 0

    def add(self, header: StartHeader, positions: NDArray[np.int64], indices: NDArray[np.int64]) -> None:
        """Add samples by their positions and indices, in the order that `header` describes."""
        numbers = positions // header.samples
        cuts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
        for low, high in pairwise(cuts):
            if low < high:
                self._begin(header, int(numbers[low]))
                self._seen[indices[low:high]] = True
                self._used += high - low

    def _begin(self, header: StartHeader, number: int) -> None:
        key = (number, header.samples, header.seed, header.data_id)
        if key == self._key:
            return
        self.close()
        self.reordered += self._order not in (None, key[1:])
        self._key, self._order = key, key[1:]
        self._seen = np.zeros(header.samples, np.bool_)
        self._used = 0
        low, high = number * header.samples, (number + 1) * header.samples
        self._left_out = sum(max(0, min(high, end) - max(low, begin)) for begin, end in header.left_out)

    def close(self, *, is_last: bool = False) -> None:
        """End the current epoch. `is_last`: the run may still be in it."""
        if self._key is None:
            return
        number, length, _, _ = self._key
        epoch = Epoch(number, length, self._used, int(self._seen.sum()), self._left_out, is_last)
        self._key = None
        if epoch.used == epoch.distinct == epoch.samples:
            self.whole += 1
        else:
            self.others.append(epoch)


def check_samples(window: Window, rows: Rows, epochs: Epochs) -> Wrong | None:
    """Find the first step in which a rank used other samples than those of its positions. Add the samples to `epochs`.

    Every rank has recorded the steps of the window, and each position is once in `rows`.
    """
    header = window.start.header
    for part, low, high in _parts(window, rows):
        origin = int(rows.begins[low])
        indices = sample_indices(np.arange(origin, int(rows.ends[high - 1])), header.samples, header.seed).astype("<i8")
        data = memoryview(indices.tobytes())
        errors = [_differing(part, rank, data, origin) for rank in window.start.entries]
        found = min(filter(None, errors), key=lambda w: w.step, default=None)
        if found is not None:
            return found
        used = _positions(rows.begins[low:high], rows.ends[low:high])
        epochs.add(header, used, indices[used - origin])
    return None


def _parts(window: Window, rows: Rows) -> Iterator[tuple[Window, int, int]]:
    """Split the window into pieces of some steps, and yield each with the range of its rows."""
    each = max(1, _POSITIONS_AT_ONCE // window.start.header.global_batch)
    for first in range(window.first, window.last, each):
        last = min(first + each, window.last)
        low, high = np.searchsorted(rows.steps, [first, last], side="right")
        yield replace(window, first=first, last=last), int(low), int(high)


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


def _positions(begins: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return all positions in sorted ranges."""
    lengths = ends - begins
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)[:-1]])
    return np.repeat(begins - before, lengths) + np.arange(int(lengths.sum()))
