"""B and E in pairs, by array operations, a chunk at a time. An E ends the last B of its tensor that is still open."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SMALL = 1 << 15


@dataclass(frozen=True)
class Ends:
    """Beginnings and ends of spans in the order of the file.

    Attributes:
        begins: whether it is a B; else an E [n].
        tensor: its number [n].
        phase: of B [n].
        ts: microseconds [n].
        nbytes: of E [n].
    """

    begins: NDArray[np.bool_]
    tensor: NDArray[np.int64]
    phase: NDArray[np.int64]
    ts: NDArray[np.float64]
    nbytes: NDArray[np.int64]

    def take(self, which: NDArray[Any]) -> Ends:
        """Some of them."""
        return Ends(self.begins[which], self.tensor[which], self.phase[which], self.ts[which], self.nbytes[which])


class Pairs:
    """Puts them together.

    Attributes:
        orphans: how many ends without a beginning there were so far, by tensor.
    """

    def __init__(self) -> None:
        empty = np.empty(0, np.int64)
        self._open = Ends(np.empty(0, np.bool_), empty, empty, np.empty(0), empty)
        self.orphans: Counter[int] = Counter()

    @property
    def still_open(self) -> int:
        """Beginnings without an end, so far."""
        return len(self._open.tensor)

    def clear(self) -> None:
        """Forget what is open."""
        self._open = self._open.take(np.empty(0, np.int64))

    def add(self, ends: Ends) -> tuple[Ends, NDArray[np.int64]]:
        """Take in a chunk.

        Returns:
            What is open and the chunk together, and of each pair [2, n] the places in it, ordered by its end.
        """
        given = _join(self._open, ends)
        order = _stable_order(given.tensor)
        begins, tensor = given.begins[order], given.tensor[order]
        kept = _without_orphans(begins, tensor)
        if len(kept) < len(order):
            self.orphans.update(np.delete(tensor, kept).tolist())
        order, begins, tensor = order[kept], begins[kept], tensor[kept]
        level = _depth(begins, tensor) + ~begins  # an end has that of its beginning
        by_level = _stable_order(level)
        first, second = by_level[:-1], by_level[1:]
        is_pair = begins[first] & ~begins[second] & (tensor[first] == tensor[second]) & (level[first] == level[second])
        begin, end = order[first[is_pair]], order[second[is_pair]]
        begin_of = np.full(len(given.tensor), -1)
        begin_of[end] = begin
        by_end = np.flatnonzero(begin_of >= 0)
        opened = given.begins.copy()
        opened[begin] = False
        self._open = given.take(np.flatnonzero(opened))
        return given, np.stack([begin_of[by_end], by_end])


def _join(first: Ends, second: Ends) -> Ends:
    return Ends(
        np.concatenate([first.begins, second.begins]),
        np.concatenate([first.tensor, second.tensor]),
        np.concatenate([first.phase, second.phase]),
        np.concatenate([first.ts, second.ts]),
        np.concatenate([first.nbytes, second.nbytes]),
    )


def _stable_order(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """As argsort; numpy sorts short numbers in linear time."""
    small = not len(numbers) or (numbers.max() < _SMALL and numbers.min() >= 0)
    return np.argsort(numbers.astype(np.int16) if small else numbers, kind="stable")


def _depth(begins: NDArray[np.bool_], tensor: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many spans of its tensor are open after each element; `tensor` is sorted."""
    change = np.where(begins, 1, -1)
    depth = np.cumsum(change)
    if not len(tensor):
        return depth
    first = np.flatnonzero(np.append(True, tensor[1:] != tensor[:-1]))
    lengths = np.diff(np.append(first, len(tensor)))
    return np.asarray(depth - np.repeat((depth - change)[first], lengths))


def _without_orphans(begins: NDArray[np.bool_], tensor: NDArray[np.int64]) -> NDArray[np.int64]:
    """Places of all but the ends at which nothing is open; `tensor` is sorted."""
    depth = _depth(begins, tensor)
    wrong = np.unique(tensor[depth < 0])
    keep = np.ones(len(tensor), np.bool_)
    starts, ends = np.searchsorted(tensor, wrong), np.searchsorted(tensor, wrong, side="right")
    for start, end in zip(starts, ends, strict=True):
        least = np.minimum.accumulate(np.minimum(depth[start:end], 0))
        keep[start:end] = np.diff(least, prepend=0) == 0
    return np.flatnonzero(keep)
