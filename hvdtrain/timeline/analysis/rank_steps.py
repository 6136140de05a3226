"""What each rank did of each step until it had to wait for the others. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hvdtrain.timeline.columns import Floats, HorovodTrace, Ints, StepTable

_WARM_UP = 2
"""First steps of a start that are unlike the rest: compiling, learning the buckets, filling Horovod's cache."""
_FEW = 10
_ASIDE_SHARE = 0.01
_MOST = 1 << 18
"""Numbers that are looked at; of longer runs, stretches all along them."""
_STRETCH = 20
_LEAST_TURNS = 4
"""Of the ticks of a tensor: of two the beginning is not known."""


@dataclass(frozen=True)
class Rounds:
    """Steps as rounds from a common start, the sums of the step before being there, to each rank's being ready.

    Attributes:
        source: our stamps, or ticks of Horovod.
        hosts: of the ranks.
        work_ms: from the common start until the rank is ready [ranks, rounds].
        column: of the step table that each round is of; empty for ticks [rounds].
        step: their numbers [rounds].
        step_ms: the median time from a round to the next.
        clock_error_ms: by how much a rank's times may be off those of rank 0 [ranks].
    """

    source: Literal["stamps", "ticks"]
    hosts: Sequence[str]
    work_ms: Floats
    column: Ints
    step: Ints
    step_ms: float
    clock_error_ms: Floats


def warm_up(table: StepTable) -> int:
    """Columns at the beginning of a table that are left out."""
    count = len(table.step)
    return min(count - 1, _WARM_UP if count >= _FEW else 1) if count > 2 else 0


def follows(table: StepTable) -> NDArray[np.bool_]:
    """Whether the step before each one is in the table too [steps]."""
    return np.concatenate([[False], np.diff(table.step) == 1]) if len(table.step) else np.zeros(0, bool)


def from_stamps(table: StepTable) -> Rounds | None:
    """Rounds of a step table; None where it has no two ranks, or no steps beyond the first.

    Steps that follow an evaluation or a checkpoint are left out where enough others remain: all ranks end these
    together, but not when the sums of the step before were there.
    """
    ranks, steps = table.ready_us.shape
    if ranks < 2 or steps < 2:
        return None
    released = np.roll(np.median(table.released_us, axis=0), 1)
    chained = follows(table)
    begin = np.where(chained, released, np.median(table.start_us, axis=0))
    work = (table.ready_us - begin) / 1e3
    length = np.median(table.end_us, axis=0) - begin
    whole = np.isfinite(work).all(axis=0)
    whole &= np.arange(steps) >= warm_up(table)
    if not whole.any():
        return None
    step_ms = float(np.median(length[whole])) / 1e3
    aside = table.parts_us.get("aside")
    plain = whole if aside is None else whole & (np.nanmax(aside, axis=0) / 1e3 <= _ASIDE_SHARE * step_ms)
    column = np.flatnonzero(plain if plain.sum() * 2 >= whole.sum() else whole)
    column = column[_thinned(len(column), ranks)]
    error = np.broadcast_to(np.asarray(table.clock_error_us, float), ranks) / 1e3
    return Rounds(
        "stamps", table.hosts, work[:, column], column.astype(np.int32), table.step[column], step_ms, np.array(error)
    )


def _thinned(count: int, ranks: int) -> Ints:
    """Indices of at most `_MOST` numbers in stretches of consecutive rounds, evenly spread."""
    most = max(_STRETCH, _MOST // ranks)
    if count <= most:
        return np.arange(count, dtype=np.int32)
    stretches = most // _STRETCH
    begins = np.linspace(0, count - _STRETCH, stretches).astype(np.int32)
    return np.unique(begins[:, None] + np.arange(_STRETCH, dtype=np.int32))


def from_ticks(traces: Sequence[HorovodTrace]) -> Rounds | None:
    """Rounds from the ticks in which Horovod says when each rank was ready for a tensor; None where it wrote too few.

    A round is one negotiation of every tensor that comes again and again; a rank is ready when it is so for the last of
    them. Rank 0 hears of the others once a cycle: finer than that the ticks are not. They are there for the first
    steps alone, unless HOROVOD_CACHE_CAPACITY=0.
    """
    found = [rounds for trace in traces if (rounds := _rounds_of(trace)) is not None]
    return max(found, key=lambda rounds: rounds.work_ms.shape[1], default=None)


def _rounds_of(trace: HorovodTrace) -> Rounds | None:
    ranks = int(trace.tick_rank.max()) + 1 if len(trace.tick_rank) else 0
    if ranks < 2:
        return None
    by_tensor = [each for tensor in np.unique(trace.tick_tensor) if (each := _turns(trace, int(tensor), ranks)).size]
    if not by_tensor:
        return None
    counts = np.array([each.shape[1] for each in by_tensor])
    # What comes once are broadcasts of the start; what comes more often than most, no part of each step.
    often = counts[counts >= _LEAST_TURNS]
    if not len(often):
        return None
    usual = int(np.bincount(often).argmax())
    same = [each for each, count in zip(by_tensor, counts, strict=True) if count == usual]
    ready = np.max(np.stack(same), axis=0)
    ready = ready[:, 1:]  # the first one waits for what the program did before
    begin = np.roll(ready.max(axis=0), 1)
    begin[0] = begin[1] - np.median(np.diff(ready.max(axis=0))) if ready.shape[1] > 1 else ready[:, 0].min()
    work = (ready - begin)[:, 1:] / 1e3
    if work.shape[1] < 1:
        return None
    step_ms = float(np.median(np.diff(ready.max(axis=0)))) / 1e3
    nowhere = np.zeros(0, np.int32)
    return Rounds(
        "ticks", [""] * ranks, work, nowhere, np.arange(2, 2 + work.shape[1], dtype=np.int32), step_ms, np.zeros(ranks)
    )


def _turns(trace: HorovodTrace, tensor: int, ranks: int) -> Floats:
    """When each rank was ready for each turn of a tensor [ranks, turns]; as far as every rank ticked once a turn."""
    mine = np.flatnonzero(trace.tick_tensor == tensor)
    mine = mine[np.argsort(trace.tick_us[mine], kind="stable")]
    turns = len(mine) // ranks
    who = trace.tick_rank[mine[: turns * ranks]].reshape(turns, ranks)
    good = (np.sort(who, axis=1) == np.arange(ranks)).all(axis=1)
    turns = int(np.argmin(good)) if not good.all() else turns
    times = trace.tick_us[mine[: turns * ranks]].reshape(turns, ranks)
    ready = np.empty((ranks, turns))
    np.put_along_axis(ready, who[:turns].T.astype(np.intp), times.T, axis=0)
    return ready
