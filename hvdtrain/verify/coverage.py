"""Check that the ranks of a start used the positions of each step exactly once. Pure, over columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hvdtrain.errors import listed
from hvdtrain.verify.starts import Ints, Window

_MOST_RANGES = 3
"""Most ranges of positions that a line lists."""


@dataclass(frozen=True)
class Wrong:
    """An error as a sentence, at the first step that has it."""

    step: int
    text: str


@dataclass(frozen=True)
class Rows:
    """Ranges [begin, end) of positions with their step and the rank that used them, in order; each column is [M]."""

    steps: Ints
    begins: Ints
    ends: Ints
    ranks: Ints


def find_unrecorded(window: Window) -> Wrong | None:
    """Find the first step that a rank has not recorded exactly once."""
    errors = []
    for rank in range(window.start.header.size):
        wanted = np.arange(window.first + 1, window.last + 1)
        if rank not in window.start.entries:
            step, recorded = window.first + 1, wanted[:0]
        else:
            recorded = window.entries(rank).steps
            both = min(len(recorded), len(wanted))
            differing = np.flatnonzero(recorded[:both] != wanted[:both])
            step = int(wanted[differing[0]]) if len(differing) else window.first + both + 1
        if len(recorded) != len(wanted) or (len(recorded) and step <= window.last):
            errors.append(Wrong(step, f"the ledger of rank {rank} does not have step {step} exactly once and in order"))
    return min(errors, key=lambda wrong: wrong.step, default=None)


def collect_rows(window: Window) -> Rows:
    """Collect the ranges in a window that every rank has recorded."""
    parts: list[list[Ints]] = []
    for rank in window.start.entries:
        entries = window.entries(rank)
        steps = np.repeat(entries.steps, np.diff(entries.first))
        parts.append([steps, entries.begins, entries.ends, np.full(len(steps), rank)])
    steps, begins, ends, ranks = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.lexsort((begins, steps))
    return Rows(steps[order], begins[order], ends[order], ranks[order])


def find_uncovered(window: Window, rows: Rows) -> Wrong | None:
    """Find the first step in which some position was not used exactly once, in the order of the stream."""
    header, count = window.start.header, window.last - window.first
    holes = _Holes(header.left_out)
    inside = holes.index_after(rows.begins)
    bad = (rows.begins >= rows.ends) | (holes.begins[inside] < rows.ends)
    begins, ends = holes.without(rows.begins), holes.without(rows.ends)
    origin = _origin(window, holes)
    bad |= begins != np.concatenate([np.array([origin], np.int64), ends[:-1]])
    wanted = origin + np.arange(1, count + 1) * header.global_batch
    last_row = np.searchsorted(rows.steps, np.arange(window.first + 1, window.last + 1), side="right") - 1
    reached = np.where(last_row >= 0, ends[np.maximum(last_row, 0)] if len(ends) else origin, origin)
    short = np.flatnonzero(reached != wanted)
    steps = [int(rows.steps[np.argmax(bad)])] if bad.any() else []
    steps += [window.first + 1 + int(short[0])] if len(short) else []
    if not steps:
        return None
    step = min(steps)
    return Wrong(step, _describe(step, window, rows, holes))


def _origin(window: Window, holes: _Holes) -> int:
    """Return the first position of a window, counted without holes."""
    header = window.start.header
    return int(holes.without(np.array([header.position]))[0]) + (window.first - header.from_step) * header.global_batch


def _describe(step: int, window: Window, rows: Rows, holes: _Holes) -> str:
    header = window.start.header
    origin = _origin(window, holes) + (step - 1 - window.first) * header.global_batch
    wanted = holes.with_them(origin + np.arange(header.global_batch))
    is_of_step = rows.steps == step
    columns = (column[is_of_step].tolist() for column in (rows.begins, rows.ends, rows.ranks))
    ranges = list(zip(*columns, strict=True))
    used = np.concatenate([np.zeros(0, np.int64), *(np.arange(begin, end) for begin, end, _ in ranges)])
    values, counts = np.unique(used, return_counts=True)
    errors = {
        "not used": np.setdiff1d(wanted, values),
        "used more than once": values[counts > 1],
        "not of this step": np.setdiff1d(values, wanted),
    }
    found = "; ".join(f"position(s) {describe_ranges(which)} {how}" for how, which in errors.items() if len(which))
    recorded = ", ".join(f"rank {rank} [{begin}, {end})" for begin, end, rank in ranges)
    return f"step {step}: {found or 'ranges out of order'}; the ledger contains: {recorded or 'nothing'}"


def describe_ranges(positions: Ints) -> str:
    """Describe sorted positions as ranges."""
    cuts = np.flatnonzero(np.diff(positions) != 1) + 1
    parts = [(int(part[0]), int(part[-1])) for part in np.split(positions, cuts) if len(part)]
    return listed((f"{a}" if a == b else f"{a} to {b}" for a, b in parts), _MOST_RANGES, " and {} more ranges")


class _Holes:
    """Skipped ranges in order, with a last one at the end of all positions."""

    def __init__(self, left_out: Sequence[Sequence[int]]) -> None:
        end = np.iinfo(np.int64).max
        self.begins, self.ends = np.array([*left_out, [end, end]], np.int64).T
        self.before = np.cumsum([0, *(self.ends - self.begins)[:-1]])  # number of skipped positions before each hole

    def index_after(self, positions: Ints) -> NDArray[np.intp]:
        """Return the index of the first hole that ends after each position."""
        return np.searchsorted(self.ends, positions, side="right")

    def without(self, positions: Ints) -> Ints:
        """Return the positions, counted without the holes before them."""
        return np.asarray(positions - self.before[self.index_after(positions)])

    def with_them(self, counted: Ints) -> Ints:
        """Return the positions from such counts: the inverse of `without`."""
        starts = (self.begins - self.before)[:-1]
        return np.asarray(counted + self.before[np.searchsorted(starts, counted, side="right")])
