"""The time of each rank in each step until it waits for the others. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hvdtrain.timeline.columns import Floats, HorovodTrace, Ints, StepTable

WAITS = ("gather", "activations")
"""Parts in which a rank waits for others: they are no work of its own."""

_WARM_UP = 2
"""Warm-up steps of a start: compilation, bucket order, Horovod's cache."""
_FEW = 10
_SLOW, _HALF, _MOST_OF_RUN = 1.5, 0.5, 0.25
"""Of a usual step, of the steps of a start-up, and of all steps."""
_ASIDE_SHARE = 0.01
_MOST = 1 << 18
"""Largest number of values used; longer runs are sampled in stretches."""
_STRETCH = 20
_LEAST_TURNS = 4
"""Exchanges of a tensor."""


@dataclass(frozen=True)
class Rounds:
    """Steps as rounds, from the sums of the step before until each rank is ready."""

    source: Literal["stamps", "ticks"]  # our stamps, or ticks of Horovod
    hosts: Sequence[str]
    work_ms: Floats  # from the common start until the rank is ready, less its `WAITS` [ranks, rounds]
    column: Ints  # of each round in the step table; for ticks, which have none, as `step` [rounds]
    step: Ints
    weight: Floats  # number of steps that each represents [rounds]
    step_ms: float  # the median time from a round to the next
    clock_error_ms: Floats  # bound of the error of a rank's times, compared with rank 0's [ranks]

    def take(self, places: Ints) -> Rounds:
        """Return only some of the rounds."""
        columns: dict[str, Any] = {name: getattr(self, name)[places] for name in ("column", "step", "weight")}
        return replace(self, work_ms=self.work_ms[:, places], **columns)

    def joined(self, later: Sequence[Rounds]) -> Rounds:
        """Return these rounds and later ones."""
        every = (self, *later)
        names = ("column", "step", "weight")
        columns: dict[str, Any] = {name: np.concatenate([getattr(each, name) for each in every]) for name in names}
        return replace(self, work_ms=np.concatenate([each.work_ms for each in every], axis=1), **columns)


def warm_up(table: StepTable) -> int:
    """Return the number of warm-up steps at the beginning of a table: two, or those of a longer start-up."""
    count = len(table.step)
    if count <= 2:
        return 0
    length = np.median(table.end_us - table.start_us, axis=0)
    return min(count - 1, max(_WARM_UP if count >= _FEW else 1, start_up_steps(length)))


def start_up_steps(length: Floats) -> int:
    """Return how many steps at the beginning are a start-up: at least half of them are slow, and the last one is."""
    most = int(_MOST_OF_RUN * len(length))
    slow = length[:most] > _SLOW * np.median(length)
    places = np.flatnonzero(slow & (np.cumsum(slow) >= _HALF * np.arange(1, most + 1)))
    return int(places[-1]) + 1 if len(places) else 0


def follows(step: Ints) -> NDArray[np.bool_]:
    """Return whether each of ascending steps comes right after the one before it [steps]."""
    return np.asarray(np.diff(step, prepend=step[:1]) == 1)


def from_stamps(table: StepTable) -> Rounds | None:
    """Return the rounds of a step table; None with fewer than two ranks or two steps.

    Waits for other ranks before the sums, for activations and parameters, are no work of a rank.

    Steps after an evaluation or a checkpoint are excluded if enough others remain: they do not begin with the sums of
    the step before.
    """
    ranks, steps = table.ready_us.shape
    if ranks < 2 or steps < 2:
        return None
    released = np.roll(np.median(table.released_us, axis=0), 1)
    chained = follows(table.step)
    begin = np.where(chained, released, np.median(table.start_us, axis=0))
    work = (table.ready_us - begin - sum(table.parts_us[part] for part in WAITS if part in table.parts_us)) / 1e3
    length = np.median(table.end_us, axis=0) - begin
    warm = np.arange(steps) >= warm_up(table)
    step_ms = float(np.median(length[warm])) / 1e3
    plain = warm & (np.nanmax(table.parts_us["aside"], axis=0) / 1e3 <= _ASIDE_SHARE * step_ms)
    column = np.flatnonzero(plain if plain.sum() * 2 >= warm.sum() else warm)
    column = column[_thinned(len(column), ranks)]
    work = _without_stages(work[:, column], table.stages)
    step, error = table.step[column], table.clock_error_us / 1e3
    weight = represented(np.diff(step, prepend=step[:1] - 1))
    return Rounds("stamps", table.hosts, work, column.astype(np.int32), step, weight, step_ms, error)


def _without_stages(work: Floats, stages: int) -> Floats:
    """Return the times as if all stages of a pipeline were ready at the same time, in the median [ranks, steps].

    By the order of passes, the first stage is ready last. Ranks of one stage are compared, with the first of them.
    """
    stage, of_rank = np.arange(len(work)) * stages // len(work), np.median(work, axis=1)
    usual = np.array([of_rank[stage == each].min() for each in range(stages)])
    return np.asarray(work + (usual.max() - usual)[stage, None])


def represented(steps: Floats | Ints) -> Floats:
    """Return how many steps each of a sample represents. A gap between two stretches counts half to each.

    `steps` from the one before in the sample [n].
    """
    if not len(steps):
        return np.zeros(0)
    stretch = np.cumsum(steps > 1)
    counts = np.bincount(stretch)
    between = (steps[steps > 1] - 1) / 2
    before, after = np.append(0.0, between), np.append(between, 0.0)
    found: Floats = ((counts + before + after) / counts)[stretch]
    return found


def _thinned(count: int, ranks: int) -> Ints:
    """Return indices of evenly spread stretches of rounds, with at most `_MOST` values in total."""
    most = max(_STRETCH, _MOST // ranks)
    if count <= most:
        return np.arange(count, dtype=np.int32)
    stretches = most // _STRETCH
    begins = np.linspace(0, count - _STRETCH, stretches).astype(np.int32)
    return np.unique(begins[:, None] + np.arange(_STRETCH, dtype=np.int32))


def from_ticks(traces: Sequence[HorovodTrace]) -> Rounds | None:
    """Return rounds from Horovod's ticks, which say when each rank was ready for a tensor; None with too few ticks.

    A round is one negotiation of every recurring tensor. A rank is ready when it is ready for the last of them. The
    resolution is one cycle of rank 0. Horovod writes ticks for the first steps only, unless HOROVOD_CACHE_CAPACITY=0.
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
    # Tensors that occur once are broadcasts of the start. Others with an unusual count are not part of each step.
    often = counts[counts >= _LEAST_TURNS]
    if not len(often):
        return None
    usual = int(np.bincount(often).argmax())
    same = [each for each, count in zip(by_tensor, counts, strict=True) if count == usual]
    ready = np.max(np.stack(same), axis=0)[:, 1:]  # the first round includes work before training
    end = ready.max(axis=0)
    work = (ready[:, 1:] - end[:-1]) / 1e3
    step_ms = float(np.median(np.diff(end))) / 1e3
    number = np.arange(2, 2 + work.shape[1], dtype=np.int32)
    return Rounds("ticks", [""] * ranks, work, number, number, np.ones(len(number)), step_ms, np.zeros(ranks))


def _turns(trace: HorovodTrace, tensor: int, ranks: int) -> Floats:
    """Return when each rank was ready for each exchange of a tensor [ranks, turns], while all ranks tick once."""
    mine = np.flatnonzero(trace.tick_tensor == tensor)
    mine = mine[np.argsort(trace.tick_us[mine], kind="stable")]
    turns = len(mine) // ranks
    tick_ranks = trace.tick_rank[mine[: turns * ranks]].reshape(turns, ranks)
    good = (np.sort(tick_ranks, axis=1) == np.arange(ranks)).all(axis=1)
    turns = int(np.argmin(good)) if not good.all() else turns
    times = trace.tick_us[mine[: turns * ranks]].reshape(turns, ranks)
    ready = np.empty((ranks, turns))
    np.put_along_axis(ready, tick_ranks[:turns].T.astype(np.intp), times.T, axis=0)
    return ready
