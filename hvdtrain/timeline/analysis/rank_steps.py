"""The time of each rank in each step until it waits for the others. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hvdtrain.observe.past_journal import JournalStart
from hvdtrain.spans import NESTED
from hvdtrain.timeline.analysis.phases import count_steps
from hvdtrain.timeline.columns import Floats, HorovodTrace, Ints, StepTable

_Places = NDArray[np.intp]

_SPANS, _FACTS = ("data", "gc"), ("cpu_wait_us", "stopped_us")
"""Times that alone may show that a rank is late: parts of a step, and figures of a block."""
_WARM_UP = 2
"""Warm-up steps of a start: compilation, bucket order, Horovod's cache."""
_FEW = 10
_SLOW, _HALF, _MOST_OF_RUN = 1.5, 0.5, 0.25
"""Of a usual step, of the steps of a start-up, and of all steps."""
_LEAST_MS, _LEAST_SHARE = 0.2, 0.01
"""A smaller cost, in ms or as a share of a step, makes no straggler."""
STALL = 10.0
"""Times a usual step: a step that takes longer, after the start-up, has stalled."""
_ASIDE_SHARE = 0.01
_MOST = 1 << 18
"""Largest number of values used; longer runs are sampled in stretches."""
_STRETCH = 20
_APART, _TIMES = 4, 128
"""The least steps of a part of the time between exchanges, and how many longer ones a run may have."""
_LEAST_TURNS = 4
"""Exchanges of a tensor."""
_TOGETHER = 0.9
"""Of the steps: where ranks exchange in more than these, they do in all, and stamps of the others are imprecise."""


@dataclass(frozen=True)
class Rounds:
    """Rounds from one exchange of all ranks to the next: a step, or several of workers apart, or parts of that time.

    Times are means of the steps in a round.
    """

    source: Literal["stamps", "ticks"]  # our stamps, or ticks of Horovod
    hosts: Sequence[str]
    work_ms: Floats  # from the common start until the rank is ready, less its waits on the way [ranks, rounds]
    column: Ints  # of each round's last step in the step table; for ticks, which have none, as `step` [rounds]
    step: Ints
    weight: Floats  # number of steps that each represents [rounds]
    step_ms: float  # the median time of a step
    clock_error_ms: Floats  # bound of the error of a rank's times, compared with rank 0's [ranks]
    length: Ints  # number of steps with stamps in each, up to `column` [rounds]
    wait_ms: Floats  # of each rank for others; NaN if unknown [ranks, rounds]
    alone_ms: Floats  # times that alone may show that a rank is late [parts, ranks, rounds]
    fewer_ms: Floats = field(default_factory=lambda: np.zeros((1, 1)))
    """How much earlier than `work_ms` a rank is ready because it has fewer micro-batches [ranks, 1]."""

    @property
    def least_ms(self) -> float:
        """The smallest cost of a rank, per step, that counts."""
        return max(_LEAST_MS, _LEAST_SHARE * self.step_ms)

    def take(self, places: Ints) -> Rounds:
        """Return only some of the rounds."""
        taken: dict[str, Any] = {name: getattr(self, name)[..., places] for name in _OF_ROUNDS}
        return replace(self, **taken)

    def joined(self, later: Sequence[Rounds]) -> Rounds:
        """Return these rounds and later ones."""
        fields = {name: [getattr(each, name) for each in (self, *later)] for name in _OF_ROUNDS}
        whole: dict[str, Any] = {name: np.concatenate(values, axis=-1) for name, values in fields.items()}
        return replace(self, **whole)

    def steps(self) -> Ints:
        """Return the columns of all steps in the rounds, ascending."""
        return np.concatenate([np.arange(c - n + 1, c + 1) for c, n in zip(self.column, self.length, strict=True)])

    def mean_of(self, values: Floats) -> Floats:
        """Return the mean over the steps of each round, of values of the step table [..., steps]."""
        starts = np.cumsum(self.length) - self.length
        return np.asarray(np.add.reduceat(values[..., self.steps()], starts, axis=-1) / self.length)


_OF_ROUNDS = ("work_ms", "column", "step", "weight", "length", "wait_ms", "alone_ms")
"""Fields with a value for each round."""


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


def stalls_of(start: JournalStart) -> dict[int, float]:
    """Return by how much longer than a usual step each stalled step took, ms. The journal has every step.

    The steps in which workers that train apart exchange are none.
    """
    step, ms = np.array(start.steps), 1e3 * np.array(start.seconds)
    if not len(ms):
        return {}
    usual = np.median(ms)
    outer = [event["at_step"] for event in start.events_named("outer_step") if isinstance(event.get("at_step"), int)]
    mine = (np.arange(len(ms)) >= start_up_steps(ms)) & (ms > STALL * usual) & ~np.isin(step, outer)
    return dict(zip(step[mine].tolist(), (ms[mine] - usual).tolist(), strict=True))


def follows(step: Ints) -> NDArray[np.bool_]:
    """Return whether each of ascending steps comes right after the one before it [steps]."""
    return np.asarray(np.diff(step, prepend=step[:1]) == 1)


def exchanges(table: StepTable) -> NDArray[np.bool_]:
    """Return in which steps all ranks exchange: no rank has the sums before all are ready; few of workers apart."""
    latest = table.ready_us.max(axis=0) - np.max(table.clock_error_us, initial=0.0)
    found = table.released_us.min(axis=0) >= latest
    return np.asarray(found | (found.sum() >= _TOGETHER * len(found)))


def waits_us(table: StepTable) -> tuple[Floats, Floats]:
    """Return how long each rank waits in exchanges of all ranks, and in others, within a worker [ranks, steps]."""
    last = table.released_us - table.ready_us
    of_all = np.where(exchanges(table), last, 0.0)
    return of_all, np.maximum(0.0, np.nan_to_num(table.parts_us.get("wait", last)) - of_all)


def from_stamps(table: StepTable, *, divides: bool = False) -> Rounds | None:
    """Return the rounds of a step table; None with fewer than two ranks or two steps, or without an exchange.

    `divides`: the time between exchanges of workers apart, into rounds of equal length.

    Waits for other ranks before the sums, for activations, parameters and the sums of a worker, are no work of a rank.

    Steps after an evaluation or a checkpoint are excluded if enough others remain: they do not begin with the sums of
    the step before.
    """
    ranks, steps = table.ready_us.shape
    if ranks < 2 or steps < 2:
        return None
    together, (of_all, waits) = exchanges(table), waits_us(table)
    released = np.where(together, np.median(table.released_us, axis=0), table.end_us)
    start = np.median(table.start_us, axis=0) if together.all() else table.start_us
    begin = np.where(follows(table.step), np.roll(released, 1, axis=1), start)
    waits = waits + sum(table.parts_us[part] for part in NESTED if part in table.parts_us)
    work = (np.where(together, table.ready_us, table.end_us) - begin - waits) / 1e3
    warm = warm_up(table)
    first = ~follows(table.step) | np.roll(together, 1) | (np.arange(steps) == warm)
    whole = np.flatnonzero(first)
    begins = _divided(whole, steps) if divides else whole
    column: Ints = (np.append(begins[1:], steps) - 1).astype(np.int32)
    length = column - begins + 1
    usable = (begins >= warm) & (together[column] | divides)
    if not (usable & together[column]).any():
        return None
    of_step = np.median(table.end_us, axis=0) - np.median(begin, axis=0)
    step_ms = float(np.median((np.add.reduceat(of_step, begins) / length)[usable])) / 1e3
    aside_ms = np.add.reduceat(np.nanmax(table.parts_us["aside"], axis=0), begins) / 1e3
    plain = usable & (aside_ms <= _ASIDE_SHARE * length * step_ms)
    kept = np.flatnonzero(plain if plain.sum() * 2 >= usable.sum() else usable)
    kept = kept[_thinned(len(kept), ranks)]
    column, length = column[kept], length[kept].astype(np.int32)
    step, error = table.step[column], table.clock_error_us / 1e3
    found = Rounds("stamps", table.hosts, work, column, step, error, step_ms, error, length, work, work)
    used, each = found.steps(), np.zeros(steps)
    each[used] = represented(np.diff(table.step[used], prepend=table.step[used[:1]] - 1))
    own = _without_stages(found.mean_of(work), table.stages)
    waited = np.add(found.mean_of(waits / 1e3), _waits_ms(of_all / 1e3, work, begins, whole, together)[:, kept])
    weight, alone = found.mean_of(each) * length, found.mean_of(_alone_us(table, warm) / 1e3)
    return replace(found, work_ms=own, weight=weight, wait_ms=waited, alone_ms=alone)


def _divided(begins: _Places, steps: int) -> _Places:
    """Divide the time between exchanges into rounds, and return where each begins. `begins`: of these times."""
    length = np.diff(begins, append=steps)
    parts = np.maximum(1, length // max(_APART, steps // _TIMES))
    part = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
    return np.asarray(np.repeat(begins, parts) + part * np.repeat(length, parts) // np.repeat(parts, parts))


def _waits_ms(last: Floats, work: Floats, begins: _Places, whole: _Places, together: NDArray[np.bool_]) -> Floats:
    """Return how long each rank waits for what others do in a round, ms per step [ranks, rounds]; NaN if unknown.

    A wait at an exchange is divided among the rounds since the one before, by how far the rank is ahead in each.

    `last`: waits at exchanges, `work` [ranks, steps], `begins` of rounds, `whole`: those after an exchange.
    """
    place, length = np.searchsorted(begins, whole), np.diff(begins, append=len(together))
    counts = np.diff(place, append=len(begins))
    ahead = np.add.reduceat(work, begins, axis=1)
    ahead = ahead.max(axis=0) - ahead
    total = np.repeat(np.add.reduceat(ahead, place, axis=1), counts, axis=1)
    even = length / np.repeat(np.add.reduceat(length, place), counts)
    share = np.where(total > 0, ahead / np.where(total > 0, total, 1.0), even)
    known = together[np.append(whole[1:], len(together)) - 1]
    waited = np.where(known, np.add.reduceat(last, whole, axis=1), np.nan)
    return np.asarray(share * np.repeat(waited, counts, axis=1) / length)


def _alone_us(table: StepTable, warm: int) -> Floats:
    """Return times that alone may show that a rank is late [parts, ranks, steps]; none of a pipeline's stages.

    What a block has from a start-up, an evaluation or the end of training is left out.
    """
    aside, unknown = np.nan_to_num(table.parts_us["aside"]).any(axis=0), [math.nan] * len(table.hosts)
    others = aside | (np.arange(len(table.step)) < warm) | (table.block == table.block[-1])
    blocks = np.array([[each.get(name) or unknown for each in table.facts] for name in _FACTS], float)
    blocks[np.isnan(blocks).any(axis=2)] = 0.0
    blocks[:, table.block[others]] = 0.0
    of_steps = blocks[:, table.block] / np.bincount(table.block)[table.block, None]
    spans = [np.nan_to_num(table.parts_us[name]) for name in _SPANS if name in table.parts_us]
    return np.stack([*spans, *of_steps.transpose(0, 2, 1)])[: 0 if table.stages > 1 else None]


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
    return np.asarray(((counts + before + after) / counts)[stretch])


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
    # Broadcasts belong to starts and checkpoints.
    tensors = [t for t in np.unique(trace.tick_tensor).tolist() if not trace.tensors[t].startswith("broadcast.")]
    by_tensor = [_turns(trace, tensor, ranks) for tensor in tensors]
    counts = np.array([each.shape[1] for each in by_tensor], np.intp)
    # Tensors with an unusual count are not part of each step, or are exchanged in each of its passes.
    often = counts[(counts >= _LEAST_TURNS) & (counts <= (count_steps(trace) or counts.max(initial=0)) + 1)]
    if not len(often):
        return None
    usual = len(times := np.bincount(often)) - 1 - int(times[::-1].argmax())  # of equally frequent ones, the largest
    same = [each for each, count in zip(by_tensor, counts, strict=True) if count == usual]
    ready = np.max(np.stack(same), axis=0)[:, 1:]  # the first round includes work before training
    end = ready.max(axis=0)
    work = (ready[:, 1:] - end[:-1]) / 1e3
    step_ms = float(np.median(np.diff(end))) / 1e3
    number = np.arange(2, 2 + work.shape[1], dtype=np.int32)
    weight, exact, length = np.ones(len(number)), np.zeros(ranks), np.ones_like(number)
    waits, parts = np.full_like(work, np.nan), np.zeros((0, *work.shape))
    return Rounds("ticks", [""] * ranks, work, number, number, weight, step_ms, exact, length, waits, parts)


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
