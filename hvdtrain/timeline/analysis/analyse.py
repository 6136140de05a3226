"""Analyse the traces of a run: each start or round has ranks of its own, and counts by its steps. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hvdtrain.observe.cost import as_mapping, cost_of
from hvdtrain.observe.past_journal import JournalStart
from hvdtrain.observe.scalars import numbers
from hvdtrain.timeline import wording
from hvdtrain.timeline.analysis import budget, communication
from hvdtrain.timeline.analysis.analysis import Analysis, Blame, Budget, Estimate, Memory, OuterSteps, RankRow, Spell
from hvdtrain.timeline.analysis.findings import find
from hvdtrain.timeline.analysis.goodput import Goodput, efficiency, goodput_of, scaling
from hvdtrain.timeline.analysis.history import changes, over_time, start_up
from hvdtrain.timeline.analysis.inputs import Facts
from hvdtrain.timeline.analysis.lateness import median_of_others
from hvdtrain.timeline.analysis.phases import count_steps, only_steps
from hvdtrain.timeline.analysis.rank_steps import Rounds, from_ticks, stalls_of, warm_up
from hvdtrain.timeline.analysis.shares import stragglers_of
from hvdtrain.timeline.analysis.straggler_causes import causes_of
from hvdtrain.timeline.analysis.stragglers import LEAST_ROUNDS, Stragglers, find_stragglers, weighed_mean
from hvdtrain.timeline.columns import HorovodTrace, RunTrace

ENOUGH = 10
"""Recorded steps of a start that is analysed."""


def analyse(run: RunTrace) -> Analysis:
    """Analyse a run, or Horovod Timelines alone."""
    ticks = run.horovod
    if run.steps is None and run.horovod:
        run = _regular(run)
    shares = budget.exposed_shares(run.steps, run.horovod) if run.steps is not None else None
    starts = [_facts(each, ticks, shares) for each in _rounds_of(run)]
    facts = next(each for each in starts if each.run is run)
    counts = _counted_steps([each.run for each in starts])
    others = [(each, count / sum(counts)) for each, count in zip(starts, counts, strict=True) if each is not facts]
    goodput = _goodput(run, starts)
    late = [other.blame for other, _ in others if other.blame.late]
    reason = "; ".join(filter(None, [facts.blame.reason, *map(wording.earlier_straggler, late[-1:])]))
    facts = replace(facts, budget=_weighed_budget(starts, counts), blame=replace(facts.blame, reason=reason))
    findings, memory = find(facts, others), run.newest("memory")
    several = sum(bool(finding.cost_ms) for finding in findings) > 1
    overlap = ["the gains of findings overlap: they do not add up"] if several else []
    mib = numbers(as_mapping(memory.get("mib")))
    name = run.path.name if run.path.name != ".." else ""
    return Analysis(
        title=name or run.path.resolve().name or str(run.path),  # as the user named it, but for . and ..
        size=run.size or len(facts.blame.ranks),
        budget=facts.budget,
        communication=facts.communication,
        carriers=communication.top_carriers(run),
        blame=facts.blame,
        findings=findings,
        memory=Memory(str(memory.get("where", "")), mib) if mib else None,
        cost=cost_of(run.starts),
        goodput=goodput,
        efficiency=efficiency(run, facts.budget),
        scaling=scaling(run.starts),
        outer=_outer(run),
        start_up=facts.start_up,
        changes=facts.changes,
        over_time=over_time(run, facts.changes, facts.blame),
        warnings=list(run.warnings),
        notes=[*run.notes, *_notes(facts), *overlap],
        others=late,
    )


def _rounds_of(run: RunTrace) -> list[RunTrace]:
    """Return the starts with enough stamps in order, each as a run; `run` itself for its own."""
    found = []
    for index, table in run.stamped:
        start = run.starts[index] if 0 <= index < len(run.starts) else JournalStart({})
        config = as_mapping(start.started.get("config")) or run.config
        more: dict[str, Any] = {"size": len(table.hosts), "horovod": (), "spans": (), "journal": None}
        if table is run.steps:
            found.append(run)
        elif len(table.step) >= ENOUGH:
            found.append(replace(run, steps=table, start=start, config=config, evidence=lambda: None, **more))
    return found if any(each is run for each in found) else [run]


def _counted_steps(runs: Sequence[RunTrace]) -> list[int]:
    """Return how many steps of each of several starts count: no later start repeated them. At least one does."""
    found, end = list[int](), math.inf
    for table in [run.steps for run in reversed(runs)]:
        first, last = (int(table.step[0]), int(table.step[-1])) if table is not None and len(table.step) else (0, 0)
        found.append(int(max(0, min(last, end) - first + 1)))
        end = first - 1
    return found[::-1]


def _weighed_budget(starts: Sequence[Facts], counts: Sequence[int]) -> Budget | None:
    """Return the mean budget of starts by the number of steps that count."""
    known = [(each, each.budget, count) for each, count in zip(starts, counts, strict=True) if each.budget and count]
    if len(known) < 2:
        own, table = (known[0][1], known[0][0].run.steps) if known else (None, None)
        if own is not None and table is not None and known[0][0].run.is_part:
            own = replace(own, what=f"{own.what}, only steps {table.step[0]} to {table.step[-1]}")
        return own
    total, sizes = sum(count for *_, count in known), sorted({each.run.size for each in starts})
    shares = [count / total for *_, count in known]
    found = [{part.name: part.ms for part in each.parts} for _, each, _ in known]
    names = dict.fromkeys(name for _, each, _ in known for name in (*(part.name for part in each.parts), *each.absent))
    ms = {name: weighed_mean([each.get(name, Estimate(0.0, 0.0, 0.0)) for each in found], shares) for name in names}
    ranks = f"{sizes[0]} to {sizes[-1]} ranks" if len(sizes) > 1 else wording.counted(sizes[0], "rank")
    ends = [int(step) for each in starts if each.run.steps is not None for step in each.run.steps.step[[0, -1]]]
    what = f"mean of {ranks}, steps {min(ends)} to {max(ends)} of {len(known)} starts"
    exposed = [name for _, each, _ in known for name in each.exposed or ()]
    whole = weighed_mean([each.step_ms for _, each, _ in known], shares)
    return budget.budget_of(what, whole, sum(each.steps for _, each, _ in known), ms, exposed)


def _facts(run: RunTrace, ticks: Sequence[HorovodTrace], shares: Mapping[str, Estimate] | None) -> Facts:
    """Return the facts of one start; `ticks` are used without stamps."""
    table, spent, stragglers = run.steps, None, None
    if table is not None:
        spent = budget.step_budget(table, run.horovod, run.start, shares)
        stragglers = stragglers_of(table, run.start.events_named("shares"), run.config)
    if stragglers is None and (rounds := from_ticks(ticks)) is not None:
        stragglers = find_stragglers(rounds)
    exchange, blame = communication.measure_communication(run), _blame(run, stragglers)
    begun, changed = start_up(run.journal) if run.journal is not None else None, changes(run)
    spent = spent or budget.timeline_budget(run.horovod)
    return Facts(run, spent, exchange, blame, stragglers, begun, changed, stalls_of(run.start))


def _goodput(run: RunTrace, starts: Sequence[Facts]) -> Goodput | None:
    """Return the goodput. A start in several rounds waited for late ranks as their mean, weighted by steps."""
    waited: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    known = {id(each.run.steps): each for each in starts}
    for index, table in run.stamped:
        if (facts := known.get(id(table))) is not None:
            usual_ms = facts.step_ms - facts.ms(budget.ASIDE, budget.UNRECORDED)
            late = facts.ms(budget.LATE) / usual_ms if usual_ms > 0 else 0.0
            waited[index].append((float(table.step[-1] - table.step[0]) + 1, late))
    shares = {index: sum(n * late for n, late in each) / sum(n for n, _ in each) for index, each in waited.items()}
    return goodput_of(run.starts, shares)


def _outer(run: RunTrace) -> OuterSteps | None:
    """Return means over the outer steps of the run; None without valid ones."""
    options = as_mapping(run.config.get("parallel"))
    workers = options.get("workers")
    found = []
    for event in run.start.events_named("outer_step"):
        cosines = [value for value in event.get("cosines") or () if isinstance(value, (int, float))]
        known = numbers({name: event.get(name) for name in ("sent_bytes", "wait_s", "drift")})
        if len(known) == 3 and len(cosines) == workers:
            found.append([known["sent_bytes"], 1e3 * known["wait_s"], min(cosines), known["drift"]])
    if not found or not isinstance(workers, int):
        return None
    return OuterSteps(str(options.get("sync")), workers, len(found), *map(float, np.mean(found, axis=0)))


def _regular(run: RunTrace) -> RunTrace:
    """Cut Timelines to start at their second step. Drop those without recognisable steps if there are others."""
    found = [trace for trace in run.horovod if count_steps(trace)] or run.horovod
    left = [trace.path.name for trace in run.horovod if all(trace is not each for each in found)]
    notes = [f"{name} is ignored: it has no recognisable steps" for name in left]
    return replace(run, horovod=[only_steps(trace) for trace in found], notes=[*run.notes, *notes])


def _blame(run: RunTrace, stragglers: Stragglers | None) -> Blame:
    if stragglers is None:
        return Blame("none", 0, [], [], {}, _no_stamps(run), unknown=True)
    rounds, table = stragglers.rounds, run.steps if stragglers.rounds.source == "stamps" else None
    parts = budget.parts_by_rank(table) if table is not None else {}
    behind = np.median(rounds.work_ms - median_of_others(rounds.work_ms), axis=1)
    rows = []
    for rank, host in enumerate(rounds.hosts):
        last, cost = float(stragglers.last_share[rank]), _not_negative(stragglers.cost_ms[rank])
        means, error = {name: float(values[rank]) for name, values in parts.items()}, rounds.clock_error_ms[rank]
        rows.append(RankRow(rank, host, last, cost, means, float(error), float(behind[rank])))
    causes = {rank: causes_of(rank, table, stragglers) for rank in stragglers.late} if table is not None else {}
    late = list(stragglers.late)
    order = {rank: place for place, rank in enumerate(late)}
    rows.sort(key=lambda row: (order.get(row.rank, len(late)), -row.cost_ms.value, -row.last_share))
    spells = [_spell(rank, spell, rounds) for rank in late for spell in stragglers.spells(rank)]
    steps, together = int(rounds.length.sum()), _together(run, parts)
    span = (int(run.steps.step[0]), int(run.steps.step[-1])) if run.steps is not None else (0, 0)
    unknown = not late and not (len(rounds.step) >= LEAST_ROUNDS and np.isfinite(rounds.clock_error_ms).all())
    reason = stragglers.reason
    if not late and together == run.size:
        unknown, reason = True, "all ranks wait for each other within passes, and these waits are not measured"
    return Blame(rounds.source, steps, rows, late, causes, reason, spells, together, *span, unknown)


def _together(run: RunTrace, parts: Mapping[str, Any]) -> int:
    """Return how many consecutive ranks wait for each other within passes, by waits that were not measured.

    On CPUs, those of `--parallel.tp` are not, nor are the exchanges of tokens together with it.
    """
    given = [as_mapping(run.config.get("parallel")).get(each) for each in ("tp", "cp", "ep")]
    tp, cp, ep = (each if isinstance(each, int) and each > 0 else 1 for each in given)
    is_measured = budget.ACTIVATIONS in parts and bool(np.any(parts[budget.ACTIVATIONS] > 0))
    found = math.lcm(tp, ep if tp > 1 else 1) if is_measured else math.lcm(tp * cp, ep)
    return found if run.size % found == 0 else 1


def _spell(rank: int, found: Stragglers, rounds: Rounds) -> Spell:
    work, step = found.rounds.work_ms, found.rounds.step
    behind = np.median((work - median_of_others(work))[rank])
    lasts = bool(step[-1] == rounds.step[-1])
    cost, share = _not_negative(found.cost_ms[rank]), float(found.last_share[rank])
    return Spell(rank, int(step[0]), int(step[-1]), cost, share, float(behind), lasts)


def _not_negative(cost: Estimate) -> Estimate:
    """Clip at 0: a rank that is faster than the others costs nothing."""
    return Estimate(max(0.0, cost.value), max(0.0, cost.low), max(0.0, cost.high))


def _no_stamps(run: RunTrace) -> str:
    if run.size == 1:
        return "there is only one rank"
    if run.steps is not None:
        return "too few steps to compare ranks"
    if any(len(trace.tick_us) for trace in run.horovod):
        return "Horovod's ticks, which say when each rank was ready, cover too few steps: set HOROVOD_CACHE_CAPACITY=0"
    if run.horovod:
        return "Horovod wrote no ticks: it does so in the first steps only, or with HOROVOD_CACHE_CAPACITY=0"
    return "there are no step stamps of several ranks"


def _notes(facts: Facts) -> Iterator[str]:
    run, table = facts.run, facts.run.steps
    if facts.option("parallel", "tp") not in (None, 1):
        yield "forward and backward include the exchange of activations by --parallel.tp, which is not measured"
    if table is not None and len(table.step):
        left = warm_up(table)
        if left:
            yield f"{wording.counted(left, 'warm-up step')} excluded"
        sample = budget.sample_of(table)
        stamped, steps = len(sample.columns), round(sample.steps.sum())
        if stamped < steps:
            yield f"{stamped:,} of {steps:,} steps were recorded and represent the rest"
        error = float(np.max(table.clock_error_us, initial=0.0))
        if not np.isfinite(error):
            yield "the clocks of some ranks were never compared with rank 0's: stragglers are unknown"
        elif error > 0:
            yield f"the ranks' clocks agree to within {error:.0f} us"
    elif run.horovod and not all(map(count_steps, run.horovod)):
        yield "there are no recognisable steps: tensors are exchanged unequally often; figures are of the whole file"
    for trace in run.horovod:
        yield from trace.named_damage
