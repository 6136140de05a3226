"""The budget of a step: parts that sum to its wall time. Pure.

Stamps become sparser during a long run, so recorded steps have weights.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hvdtrain.observe.past_journal import JournalStart
from hvdtrain.timeline.analysis import phases
from hvdtrain.timeline.analysis.analysis import Budget, Estimate, Part
from hvdtrain.timeline.analysis.rank_steps import follows, represented, stalls_of, waits_us, warm_up
from hvdtrain.timeline.analysis.stats import mean_of, ratio_of
from hvdtrain.timeline.columns import Floats, HorovodTrace, Ints, StepTable

LATE = "waiting for late ranks"
EXCHANGE = "exchange"
"""Exposed communication after the last rank is ready, if no Horovod Timeline shows its phases."""
UNRECORDED = "longer steps"
"""By how much stalled steps, and those without stamps, took longer than the others, by the journal."""
REST, ASIDE, IDLE = "rest", "evaluations and checkpoints", "nothing under way"
OTHER_EXCHANGE = "other exchange"
PARAMETERS = "parameter gather"
"""Wait for the parameters that other ranks have updated."""
ACTIVATIONS = "exchange of activations"
"""Wait for the activations, and their gradients, of ranks with other layers, experts or parts of a sequence."""
_LEAST = 1e-6
"""Share of a step; less is rounding."""

_NAMES = {name: name for name in ("data", "forward", "backward", "optimizer")}
_NAMES |= {"copy": "data", "clip": "optimizer", "gather": PARAMETERS, "activations": ACTIVATIONS, "aside": ASIDE}
ORDER = (
    *("data", PARAMETERS, "forward", "backward", ACTIVATIONS, LATE, *reversed(phases.PHASES), EXCHANGE, OTHER_EXCHANGE),
    *("optimizer", ASIDE, UNRECORDED, REST),
)


@dataclass(frozen=True)
class Sample:
    """The steps of a table that an analysis uses."""

    columns: Ints  # of the table [n]
    begin_us: Floats  # end of the step before; if it has no stamps, the start of the evaluations after it [ranks, n]
    aside_us: Floats  # evaluations and checkpoints since the step before [ranks, n]
    steps: Floats  # number of steps since the previous one in the sample; 1 for the first [n]
    weights: Floats  # number of steps that each represents. A gap between two stretches counts half to each [n].


def sample_of(table: StepTable, without: Collection[int] = ()) -> Sample:
    """Return the steps of a table but warm-up and `without`. Work before a start's first step belongs to no step."""
    aside = np.nan_to_num(table.parts_us["aside"])
    aside[:, :1] = 0.0
    begin = np.where(follows(table.step), np.roll(table.end_us, 1, axis=1), table.start_us - aside)
    columns = np.arange(warm_up(table), len(table.step), dtype=np.int32)
    columns = columns[~np.isin(table.step[columns], [*without])]
    steps = np.append(1.0, np.diff(table.step[columns]))[: len(columns)]
    return Sample(columns, begin[:, columns], aside[:, columns], steps, represented(steps))


def step_budget(
    table: StepTable,
    horovod: Sequence[HorovodTrace] = (),
    journal: JournalStart | None = None,
    shares: Mapping[str, Estimate] | None = None,
) -> Budget | None:
    """Return the budget of a step table: the mean over ranks and steps without warm-up; None without steps.

    A step's wall time runs from the end of the step before to its own end, so that steps add up to the run. The wait
    for the sums of all ranks is split when the last rank is ready. The time after that is split by rank 0's Horovod
    Timeline, or by given `shares`; steps outside the Timeline get the same shares. Other parts are as measured. Parts
    that overlap the wait, such as device work, are shortened.

    Stalled steps count as not recorded. Of steps between recorded ones the total is known, and from the journal the
    mean duration. What makes them longer than recorded ones is a part of its own; what else is left, as evaluations and
    checkpoints if there are any.
    """
    journal = journal or JournalStart({})
    sample = sample_of(table, stalls_of(journal))
    wall, parts = step_parts(table, sample)
    if not wall.size:
        return None
    columns = {name: values.mean(axis=0) for name, values in parts.items()}
    ms = {name: mean_of(values, sample.weights) for name, values in columns.items()}
    if (sample.steps == 1).all():
        whole = mean_of(wall.mean(axis=0))
    else:
        end = table.end_us[:, sample.columns].mean(axis=0)
        since = np.diff(end, prepend=sample.begin_us[:, 0].mean()) / 1e3
        whole = mean_of(since / sample.steps, sample.steps)
        if len(journal.steps) and ms.get(ASIDE) is not None:
            number = np.array(journal.steps)
            inside = (number >= table.step[sample.columns[0]]) & (number <= table.step[-1])
            own_ms = 1e3 * float(np.mean(np.array(journal.seconds)[inside])) if inside.any() else 0.0
            known = sum(each.value for name, each in ms.items() if name != ASIDE)
            slower = min(max(0.0, own_ms - known), max(0.0, whole.value - known))
            if slower > _LEAST * whole.value:
                columns[UNRECORDED] = np.full_like(columns[REST], slower)
                ms[UNRECORDED] = mean_of(columns[UNRECORDED], sample.weights)
        ms = _with_steps_between(ms, columns, sample.weights, whole)
    exchange = ms.pop(EXCHANGE)
    shares = shares or exposed_shares(table, horovod)
    ms |= {name: _product(exchange, share) for name, share in shares.items()}
    if len(journal.steps) or (sample.steps == 1).all():
        ms.setdefault(UNRECORDED, Estimate(0.0, 0.0, 0.0))
    ranks = len(table.hosts)
    what = "rank 0" if ranks == 1 else f"mean of {ranks} ranks"
    exposed = [name for name in ORDER if name in (PARAMETERS, ACTIVATIONS) or name in shares]
    return budget_of(what, whole, wall.shape[1], ms, exposed)


def step_parts(table: StepTable, sample: Sample) -> tuple[Floats, dict[str, Floats]]:
    """Return the wall time of each step in the sample and its parts, ms [ranks, steps]. The parts sum to it."""
    keep = sample.columns
    wall = np.maximum(0.0, (table.end_us[:, keep] - sample.begin_us) / 1e3)
    of_all, within = (waits[:, keep] / 1e3 for waits in waits_us(table))
    wait = np.clip(of_all + within, 0.0, wall)
    late = np.clip((table.ready_us.max(axis=0) - table.ready_us)[:, keep] / 1e3, 0.0, np.minimum(of_all, wait))
    parts: dict[str, Floats] = {}
    for name, durations in table.parts_us.items():
        if (shown := _NAMES.get(name)) is not None:
            known_us = sample.aside_us if shown == ASIDE else np.nan_to_num(durations[:, keep])
            parts[shown] = parts.get(shown, 0.0) + known_us / 1e3
    known = sum(parts.values(), np.zeros_like(wall))
    left = wall - wait
    fits = np.where(known > left, left / np.maximum(known, 1e-12), 1.0)
    parts = {name: values * fits for name, values in parts.items()}
    parts |= {LATE: late, EXCHANGE: wait - late, REST: np.maximum(0.0, left - known)}
    return wall, parts


def parts_by_rank(table: StepTable) -> dict[str, Floats]:
    """Return the mean of each part, and of garbage collections, which are in other parts, ms [ranks]."""
    sample = sample_of(table)
    _, parts = step_parts(table, sample)
    parts["gc"] = np.nan_to_num(table.parts_us["gc"][:, sample.columns]) / 1e3
    return {name: np.average(values, axis=1, weights=sample.weights) for name, values in parts.items()}


def _with_steps_between(
    ms: Mapping[str, Estimate], columns: Mapping[str, Floats], weights: Floats, whole: Estimate
) -> dict[str, Estimate]:
    """Add the excess of steps between recorded ones to the parts."""
    name = ASIDE if ASIDE in ms and ms[ASIDE].value > 0 else REST
    others = mean_of(sum((column for part, column in columns.items() if part != name), np.zeros(len(weights))), weights)
    value = max(0.0, whole.value - others.value)
    half = math.hypot(whole.high - whole.value, others.high - others.value)
    scale = (whole.value - value) / others.value if others.value > 0 else 1.0
    found = {part: Estimate(e.value * scale, e.low * scale, e.high * scale) for part, e in ms.items()}
    return {**found, name: Estimate(value, max(0.0, value - half), value + half)}


def _product(a: Estimate, b: Estimate) -> Estimate:
    """Multiply two independent estimates >= 0; no interval if the second has none."""
    value = a.value * b.value
    if b.low == b.high and 0 < b.value < 1:
        return Estimate(value, value, value)
    low = math.hypot((a.value - a.low) * b.value, a.value * (b.value - b.low))
    high = math.hypot((a.high - a.value) * b.value, a.value * (b.high - b.value))
    return Estimate(value, max(0.0, value - low), value + high)


def exposed_shares(table: StepTable, horovod: Sequence[HorovodTrace]) -> dict[str, Estimate]:
    """Return the phases of rank 0's wait for sums after the last rank was ready, as shares that sum to 1.

    The shares come from steps that a Timeline covers, without warm-up steps if possible.
    """
    everything = {EXCHANGE: Estimate(1.0, 1.0, 1.0)}
    start, end = table.ready_us.max(axis=0), table.released_us[0]
    traced = np.zeros(len(start), bool)
    for first, last in map(phases.extent, horovod):
        traced |= (start >= first) & (start <= last) & (end > start)
    warm = traced & (np.arange(len(start)) >= warm_up(table))
    start, end = (times[warm if warm.any() else traced] for times in (start, end))
    waiting = end - start
    if not len(waiting):
        return everything
    in_phase = phases.by_kind(horovod)
    cut = phases.partition(phases.union(start, end), {name: in_phase[name] for name in phases.PHASES})
    cut[OTHER_EXCHANGE] = cut.pop("")
    if phases.length(cut[OTHER_EXCHANGE]) > 0.95 * waiting.sum():  # the Timeline has other tensors, or another clock
        return everything
    return {name: ratio_of(phases.within(part, start, end), waiting) for name, part in cut.items()}


def timeline_budget(horovod: Sequence[HorovodTrace]) -> Budget | None:
    """Return the budget of Timelines alone: their extent by operations in progress; None if empty.

    If most tensors recur equally often, a step is one exchange of each. Else `steps` is 0, and times are totals.
    """
    ends = [phases.extent(trace) for trace in horovod]
    wall_us = sum(end - start for start, end in ends)
    if wall_us <= 0:
        return None
    steps = sum(map(phases.count_steps, horovod)) if all(map(phases.count_steps, horovod)) else 0
    parts: dict[str, float] = {}
    for trace, (start, end) in zip(horovod, ends, strict=True):
        in_phase = phases.by_kind([trace])
        in_phase[phases.OTHER] = phases.together([in_phase[phases.OTHER], in_phase.pop("")])
        cut = phases.partition((np.array([start]), np.array([end])), in_phase)
        cut[IDLE] = cut.pop("")
        for name, part in cut.items():
            parts[name] = parts.get(name, 0.0) + phases.length(part) / max(1, steps) / 1e3
    exact = {name: Estimate(ms, ms, ms) for name, ms in parts.items()}
    wall = wall_us / max(1, steps) / 1e3
    return budget_of("rank 0's communication", Estimate(wall, wall, wall), steps, exact, None)


def budget_of(
    what: str, whole: Estimate, steps: int, ms: Mapping[str, Estimate], exposed: Sequence[str] | None
) -> Budget:
    """Return a budget of parts in their order; those of 0 ms are absent."""
    names = [*(name for name in ORDER if name in ms), *(name for name in ms if name not in ORDER)]
    share = 1 / whole.value if whole.value else 0.0
    parts = [Part(name, ms[name], ms[name].value * share) for name in names if ms[name].value > _LEAST * whole.value]
    shown = [part.name for part in parts]
    absent = [name for name in names if name not in shown]
    return Budget(what, whole, steps, parts, exposed and [name for name in shown if name in exposed], absent)
