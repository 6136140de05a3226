"""Whether the ranks of a start took the positions of each step exactly once: pure, over columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hvdtrain.state.ledger import StartHeader
from hvdtrain.verify.starts import Window

_MOST_RANGES = 3
"""Of positions, that a line names."""


@dataclass(frozen=True)
class Wrong:
    """What does not hold, at its first step.

    Attributes:
        step: the first one.
        what: a sentence.
    """

    step: int
    what: str


@dataclass(frozen=True)
class Rows:
    """Ranges of all ranks, in order of step and position; each [M].

    Attributes:
        steps: whose they are.
        begins: their first positions.
        ends: one behind their last.
        ranks: who took them.
    """

    steps: NDArray[np.int64]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    ranks: NDArray[np.int64]


def untold(window: Window) -> Wrong | None:
    """The first step that a rank does not tell of, or tells of twice."""
    found = []
    for rank in range(window.start.head.size):
        wanted = np.arange(window.first + 1, window.last + 1)
        if rank not in window.start.entries:
            step, told = window.first + 1, wanted[:0]
        else:
            low, high = bounds(window, rank)
            told = window.start.entries[rank].steps[low:high]
            both = min(len(told), len(wanted))
            unlike = np.flatnonzero(told[:both] != wanted[:both])
            step = int(wanted[unlike[0]]) if len(unlike) else window.first + both + 1
        if len(told) != len(wanted) or (len(told) and step <= window.last):
            found.append(Wrong(step, f"the ledger of rank {rank} does not tell of step {step} once, in its place"))
    return min(found, key=lambda wrong: wrong.step, default=None)


def bounds(window: Window, rank: int) -> tuple[int, int]:
    """Which entries of a rank are of the window's steps."""
    steps = window.start.entries[rank].steps
    low, high = np.searchsorted(steps, [window.first, window.last], side="right")
    return int(low), int(high)


def rows_of(window: Window) -> Rows:
    """The ranges of a window that every rank tells of."""
    parts: list[list[NDArray[np.int64]]] = []
    for rank, entries in window.start.entries.items():
        steps, begins, ends = entries.rows(*bounds(window, rank))
        parts.append([steps, begins, ends, np.full(len(steps), rank)])
    steps, begins, ends, ranks = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.lexsort((begins, steps))
    return Rows(steps[order], begins[order], ends[order], ranks[order])


def uncovered(window: Window, rows: Rows) -> Wrong | None:
    """The first step whose positions were not all taken, each by one rank, in the order of the stream."""
    head, count = window.start.head, window.last - window.first
    holes = _holes(head)
    inside = holes.index_after(rows.begins)
    bad = (rows.begins >= rows.ends) | (holes.begins[inside] < rows.ends)
    begins, ends = holes.without(rows.begins), holes.without(rows.ends)
    origin = int(holes.without(np.array([head.position]))[0])
    bad |= begins != np.concatenate([np.array([origin], np.int64), ends[:-1]])
    wanted = origin + np.arange(1, count + 1) * head.global_batch
    last_row = np.searchsorted(rows.steps, np.arange(window.first + 1, window.last + 1), side="right") - 1
    reached = np.where(last_row >= 0, ends[np.maximum(last_row, 0)] if len(ends) else origin, origin)
    short = np.flatnonzero(reached != wanted)
    steps = [int(rows.steps[np.argmax(bad)])] if bad.any() else []
    steps += [window.first + 1 + int(short[0])] if len(short) else []
    if not steps:
        return None
    step = min(steps)
    return Wrong(step, _describe(step, window, rows, holes))


def _describe(step: int, window: Window, rows: Rows, holes: _Holes) -> str:
    head = window.start.head
    at = holes.with_them(holes.without(np.array([head.position]))[0] + np.arange(head.global_batch)
                         + (step - 1 - window.first) * head.global_batch)  # fmt: skip
    mine = rows.steps == step
    pairs = list(zip(rows.begins[mine].tolist(), rows.ends[mine].tolist(), rows.ranks[mine].tolist(), strict=True))
    taken = np.concatenate([np.zeros(0, np.int64), *(np.arange(begin, end) for begin, end, _ in pairs)])
    values, counts = np.unique(taken, return_counts=True)
    told = {
        "taken by nobody": np.setdiff1d(at, values),
        "taken more than once": values[counts > 1],
        "not of this step": np.setdiff1d(values, at),
    }
    found = "; ".join(f"position(s) {spans(which)} {how}" for how, which in told.items() if len(which))
    who = ", ".join(f"rank {rank} [{begin}, {end})" for begin, end, rank in pairs)
    return f"step {step}: {found or 'ranges out of order'}; the ledger says: {who or 'nothing'}"


def spans(positions: NDArray[np.int64]) -> str:
    """Positions in order as text."""
    cuts = np.flatnonzero(np.diff(positions) != 1) + 1
    parts = [(int(part[0]), int(part[-1])) for part in np.split(positions, cuts) if len(part)]
    more = f" and {len(parts) - _MOST_RANGES} more ranges" if len(parts) > _MOST_RANGES else ""
    return ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in parts[:_MOST_RANGES]) + more


@dataclass(frozen=True)
class _Holes:
    """Ranges that are left out, in order; a last one at the end of all positions."""

    begins: NDArray[np.int64]
    ends: NDArray[np.int64]

    def index_after(self, positions: NDArray[np.int64]) -> NDArray[np.intp]:
        """Of the first hole that ends behind each position."""
        return np.searchsorted(self.ends, positions, side="right")

    def without(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Positions counted without the holes that end before them."""
        counted: NDArray[np.int64] = positions - self._before()[self.index_after(positions)]
        return counted

    def with_them(self, counted: NDArray[np.int64]) -> NDArray[np.int64]:
        """The positions that `without` counts so."""
        before = self._before()
        starts = self.begins[:-1] - before[:-1]
        positions: NDArray[np.int64] = counted + before[np.searchsorted(starts, counted, side="right")]
        return positions

    def _before(self) -> NDArray[np.int64]:
        """Positions that are left out before each hole."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum((self.ends - self.begins)[:-1])])


def _holes(head: StartHeader) -> _Holes:
    end = np.iinfo(np.int64).max
    pairs = np.array([*head.left_out, [end, end]], np.int64)
    return _Holes(pairs[:, 0], pairs[:, 1])
