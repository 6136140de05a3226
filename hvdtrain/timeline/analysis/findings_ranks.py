"""Findings about ranks: stragglers, pauses and jitter. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from hvdtrain.config.sync import apportion
from hvdtrain.data.order import even_options
from hvdtrain.errors import ETC, listed
from hvdtrain.timeline import wording
from hvdtrain.timeline.analysis.analysis import Estimate, Finding, RankRow, Spell
from hvdtrain.timeline.analysis.inputs import LEAST_MS, LEAST_SHARE, Facts
from hvdtrain.timeline.analysis.shares import last_shares, workers_of
from hvdtrain.timeline.analysis.straggler_causes import dominant
from hvdtrain.timeline.analysis.stragglers import Division, Pause, mended
from hvdtrain.timeline.columns import StepTable

_MANY_PAUSES = 3
_LOOK = "check what its host did then; pauses do not count as straggler cost"
_REGULAR, _ABOUT, _MOST_OF_PAUSE = 3, 0.2, 0.5
_MANY_STEPS = 4
_MANY_SHARES = 8
_MOSTLY = 0.8

_PADDING = 0.1
_ALIKE_BATCHES = "pack samples to one length, or put samples of similar length into a step"

_COMPUTING = ("forward", "backward", "cpu", "steal", "gpu clock", "gpu throttle")
"""Causes with which each micro-batch of a rank takes longer."""

_CURES = {
    "gc": "create fewer objects per step there, or call gc.freeze() once everything is created",
    "cpu": "give each thread there a core: fewer ranks, a smaller OMP_NUM_THREADS, or no other programs on that host",
    "stopped": "find what stops it: SIGSTOP, a debugger, a suspended container or virtual machine",
    "steal": "another virtual machine uses that host's cores: move the rank",
    "gpu clock": "check that GPU with nvidia-smi -q -d CLOCK,PERFORMANCE",
    "gpu temperature": "check that host's cooling",
    "gpu throttle": "check that GPU with nvidia-smi -q -d PERFORMANCE: heat, or its power limit",
    "experts": "balance the router, with an auxiliary loss or a bias of the token choice",
    "sums": "check that host's link: its speed, its errors, other traffic",
    "between steps": "check what that rank does between steps: logging, saving, callbacks",
}


def _late(facts: Facts) -> Iterator[Finding]:
    rows = {row.rank: row for row in facts.blame.ranks}
    whole = sum(rows[each].cost_ms.value for each in facts.blame.late)
    together = f" (of {wording.ms(whole)} ms for all stragglers)" if len(facts.blame.late_groups()) > 1 else ""
    left = list(facts.blame.late)
    for host, ranks in facts.blame.slow_hosts().items():
        advice = f"run hvdtrain doctor on {host} and on another host; or leave it out"
        yield _late_together(facts, ranks, f"host {host} with {wording.ranks(ranks)} is slow", advice)
        left = [rank for rank in left if rank not in ranks]
    for group in facts.blame.late_groups(left):
        rank = group[0]
        row, spells = rows[rank], facts.blame.spells_of(rank)
        causes = facts.blame.causes.get(rank, ())
        why = f"; {causes[0].text}" if causes else ""
        of: RankRow | Spell = max(spells, key=lambda spell: spell.cost_ms.value, default=row)
        behind = f"it is {wording.behind(of.behind_ms)} the others (median)"
        cost = wording.total(rows[each].cost_ms for each in group)
        costs = f"costs {_ms(cost)} per step"
        if spells:
            costs = f"costs {_ms(of.cost_ms)} per step there, {wording.ms(cost.value)} ms over all steps"
        steps = "these steps" if spells else "steps"
        text = (
            f"{wording.straggler(facts.blame, rank)} is a straggler{wording.spells(spells)} and {costs}"
            f"{together}; {behind}, and last in {of.last_share:.0%} of {steps}{why}"
        )
        cures = [cure for cause in dominant(causes) if (cure := _cure(facts, cause.name))][:2]
        look = f"run hvdtrain doctor on its host and on another; see the steps of rank {rank}: hvdtrain timeline merge"
        advice = "; ".join(cures) or look
        equal = facts.option("parallel", "balance") in (None, "equal")
        if causes and causes[0].name in _COMPUTING and equal and facts.may_train_apart():
            advice += "; or give it fewer micro-batches: --parallel.balance speed"
        yield Finding("straggler", text, cost.value, advice)


def _late_together(facts: Facts, ranks: Sequence[int], who: str, advice: str) -> Finding:
    rows = [row for row in facts.blame.ranks if row.rank in ranks]
    when = wording.spells(min((facts.blame.spells_of(rank) for rank in ranks), key=len))
    cost, behind = sum(row.cost_ms.value for row in rows), float(np.median([row.behind_ms for row in rows]))
    named = Counter(causes[0].name for rank in ranks if (causes := facts.blame.causes.get(rank, ())))
    why = f"; mostly by {named.most_common(1)[0][0]}" if named else ""
    text = f"{who}{when}, and costs {wording.ms(cost)} ms per step: {wording.behind(behind)} the others{why}"
    return Finding("straggler", text, cost, advice)


def _fast(facts: Facts) -> Iterator[Finding]:
    """Report a minority of ranks that is much faster than the others, which are no stragglers."""
    found = facts.stragglers
    if found is None or found.ahead_ms.low <= max(LEAST_SHARE * found.rounds.step_ms, LEAST_MS):
        return
    who, verb = wording.ranks(found.fast, found.rounds.hosts), "is" if len(found.fast) == 1 else "are"
    text = f"{who} {verb} {_ms(found.ahead_ms)} per step faster than the others, for which the job waits"
    advice = "the others set the pace: compare hvdtrain doctor on both kinds of host"
    yield Finding("fast", text, found.ahead_ms.value, advice)


def _shares(facts: Facts) -> Iterator[Finding]:
    """Report the last shares by speed, and the slowest rank, for which the others no longer wait."""
    last = last_shares(facts.run.start.events_named("shares"), facts.run.size)
    if last is None:
        return
    slow, fast = int(np.argmax(last.pass_ms)), int(np.argmin(last.pass_ms))
    some = listed(last.shares, _MANY_SHARES, ETC)
    text = (
        f"micro-batches follow the speed of ranks: {some} on ranks 0, 1, ... since step {last.at_step + 1}; rank {slow}"
        f" takes {last.pass_ms[slow] / last.pass_ms[fast]:.1f} times as long for one as rank {fast}"
    )
    yield Finding("shares", text, None, f"find out what slows rank {slow}: run hvdtrain doctor on its host")


def _division(facts: Facts) -> Iterator[Finding]:
    """Report that ranks wait for those that have more micro-batches."""
    found = facts.stragglers.division if facts.stragglers else None
    if found is None:
        return
    by_count = sorted(Counter(found.passes).items(), reverse=True)
    who = ", ".join(f"{number} rank(s) with {count}" for count, number in by_count)
    text = f"unequal numbers of micro-batches cost {facts.per_step(found.cost_ms)}: {who} in each step"
    yield Finding("division", text, found.cost_ms, _evenly(facts, found))


def _evenly(facts: Facts, found: Division) -> str:
    """Return how ranks would have as much to do as each other."""
    if slow := [rank for rank in facts.blame.late if found.passes[rank] < max(found.passes)]:
        return f"keep them: {wording.ranks(slow)} with fewer would set the pace; first find what slows them"
    train, size = facts.run.config["train"], len(found.passes)
    workers = workers_of(facts.run.config, size)
    if workers is not None and workers.parts:
        speeds = [1e6 * count / max(ms, 1e-3) for count, ms in zip(found.passes, found.work_ms, strict=True)]
        served = [workers.ranks_of(worker) for worker in range(workers.count)]
        by_worker = [round(sum(speeds[r] for r in ranks) / len(workers.served_by(ranks[0]))) for ranks in served]
        parts = [max(1, share) for share in apportion(sum(found.passes), by_worker)]
        return f"divide by the measured speed: --outer.shares {','.join(str(n // math.gcd(*parts)) for n in parts)}"
    if workers is not None and size % workers.count and workers.count % size:
        return f"start a multiple of {workers.count} ranks"
    return f"give all ranks the same: {even_options(train['global_batch'], train['micro_batch'], size)}"


def _sizes(facts: Facts) -> Iterator[Finding]:
    """Report that ranks wait for the one with the largest batch."""
    found = facts.stragglers.sizes if facts.stragglers else None
    if found is None:
        return
    text = (
        f"batches of unequal size cost {_ms(found.cost_ms)} per step: the largest of a step has {found.more:.0%} more"
        f" elements than the mean, and 1,000 elements take {wording.ms(found.ms_per_1000)} ms"
    )
    yield Finding("batch_sizes", text, found.cost_ms.value, _ALIKE_BATCHES)


def _stopped(facts: Facts) -> Iterator[Finding]:
    """Report ranks with processes that were stopped, unless that is named as the cause of a straggler."""
    table = facts.run.steps
    if table is None or not len(table.step):
        return
    rows = [[float(us or 0.0) for us in values] for block in table.facts if (values := block.get("stopped_us"))]
    per_step = np.sum(np.array(rows), axis=0) / 1e3 / len(table.step) if rows else np.zeros(0)
    least = max(LEAST_SHARE * facts.step_ms, LEAST_MS)
    named = [rank for rank, causes in facts.blame.causes.items() if any(cause.name == "stopped" for cause in causes)]
    ranks = [rank for rank in np.flatnonzero(per_step >= least).tolist() if rank not in named]
    if ranks:
        most, who = float(per_step[ranks].max()), wording.ranks(ranks, table.hosts)
        whose, were = ("processes", "were") if len(ranks) > 1 else ("the process", "was")
        text = f"{whose} of {who} {were} stopped for {wording.ms(most)} ms per step"
        yield Finding("stopped", text, most, _CURES["stopped"])


def _padding(facts: Facts) -> Iterator[Finding]:
    """Report positions of texts that are only computed. Forward and backward count as proportional to positions."""
    table, journal = facts.run.steps, facts.run.journal
    if table is None or journal is None or not table.elements.any() or facts.run.start.started.get("unit") != "tokens":
        return
    share = 1 - float(np.nanmean(journal.tokens)) / float(table.elements.sum(axis=0).mean())
    if share >= _PADDING:
        cost = share * facts.ms("forward", "backward")
        text = f"{share:.0%} of the positions of batches have no loss: padding, or text that is only read"
        yield Finding("padding", text, cost, f"if it is padding: {_ALIKE_BATCHES}")


def _cure(facts: Facts, cause: str) -> str | None:
    if cause != "data":
        return _CURES.get(cause)
    if workers := int(facts.option("loader", "workers") or 0):
        return f"check that host's disk and free cores, or use more loader processes: --loader.workers {2 * workers}"
    return "load ahead of the step: --loader.workers 1; check that host's disk"


def _pauses(facts: Facts) -> Iterator[Finding]:
    """Report stalled steps, and pauses of each rank. Ranks that paused together, as on a suspended host, share one."""
    if (stragglers := facts.stragglers) is None:
        return
    by_rank: dict[int, list[Pause]] = {}
    for pause in stragglers.pauses:
        by_rank.setdefault(pause.rank, []).append(pause)
    together: dict[tuple[int, ...], list[int]] = {}
    for rank in sorted(by_rank):
        together.setdefault(tuple(sorted(pause.step for pause in by_rank[rank])), []).append(rank)
    took = {steps: max(sum(p.ms for p in by_rank[rank]) for rank in ranks) for steps, ranks in together.items()}
    order = sorted(together, key=lambda steps: -took[steps])
    looked_at = int(stragglers.rounds.length.sum()) + len({pause.step for pause in stragglers.pauses})
    stalls, stalled_ms, count = facts.stalls, sum(facts.stalls.values()), max(1, len(facts.run.start.steps))
    recorded = stalls.keys() & {pause.step for pause in stragglers.pauses}
    if not recorded and stalled_ms >= LEAST_SHARE * facts.step_ms * count:
        text = f"{wording.counted(len(stalls), 'step')} stalled, {_when([*stalls])}, {_seconds(stalled_ms)} in total"
        why, advice = "no stamps show why", "check what the hosts did then"
        if (grown := grown_waits(facts.run.steps, [*stalls])) is not None:
            late_ms, exposed_ms, last = grown
            why = f"most of it waits for {last}" if 2 * late_ms * len(stalls) > stalled_ms else "on all ranks at once"
            if 2 * exposed_ms * len(stalls) > stalled_ms:
                why, advice = "after the last rank was ready", _CURES["sums"]
        yield Finding("pause", f"{text}; {why}", stalled_ms / count, advice)
    for steps in order[:_MANY_PAUSES]:
        ranks = together[steps]
        in_steps, times, in_all_ms, cost_ms = steps, len(steps), took[steps], took[steps] / looked_at
        if 2 * len(mine := recorded.intersection(steps)) > len(steps):  # the journal has those without stamps, too
            share = len(mine) / len(recorded)
            times, in_all_ms, cost_ms = round(share * len(stalls)), share * stalled_ms, share * stalled_ms / count
            in_steps = (*stalls,) if share == 1 else steps
        longest = max(by_rank[ranks[0]], key=lambda pause: pause.ms)
        paused = f"{wording.ranks(ranks, stragglers.rounds.hosts)} paused"
        they, were = ("they", "were") if len(ranks) > 1 else ("it", "was")
        text = f"{paused} once: in step {longest.step} {they} {were} {_seconds(longest.ms)} later than the others"
        if times > 1:
            text = f"{paused} {times:,} times, {_when(in_steps)}, {_seconds(in_all_ms)} in total; longest in step"
            text += f" {longest.step}, {_seconds(longest.ms)}"
        advice = _LOOK
        if (stopped := _stopped_ms(facts, ranks[0], longest.step)) > _MOST_OF_PAUSE * longest.ms:
            text += f"; its process was stopped for {_seconds(stopped)}"
            advice = _CURES["stopped"]
        yield Finding("pause", text, cost_ms, advice)
    if left := order[_MANY_PAUSES:]:
        count = sum(len(together[steps]) for steps in left)
        text = f"{wording.counted(count, 'more rank')} paused, each for {_seconds(took[left[0]])} or less in total"
        yield Finding("pause", text, None, "check what the hosts did then")


def grown_waits(table: StepTable | None, steps: Sequence[int]) -> tuple[float, float, str] | None:
    """Return by how many ms ranks wait longer in `steps` for the last one and for the exchange; and who is last."""
    here = np.isin(table.step, steps) if table is not None else np.zeros(0, bool)
    if table is None or len(table.hosts) < 2 or here.all() or not here.any():
        return None
    last = table.ready_us.max(axis=0)
    waits = np.stack([last - table.ready_us.min(axis=0), np.median(table.released_us, axis=0) - last]) / 1e3
    late, exposed = np.median(waits[:, here], axis=1) - np.median(waits[:, ~here], axis=1)
    rank = int(np.bincount(table.ready_us[:, here].argmax(axis=0)).argmax())
    return float(late), float(exposed), wording.ranks([rank], table.hosts)


def _when(steps: Sequence[int]) -> str:
    """Say in which steps, or how often if that is regular."""
    gaps = np.diff(steps)
    if len(gaps) >= _REGULAR:
        period = float(np.median(gaps))
        if period > 1 and np.all(np.abs(gaps - period) <= max(1.0, _ABOUT * period)):
            return f"about every {period:.0f} steps"
    some = listed((f"{step:,}" for step in steps), _MANY_STEPS, " and others")
    return f"in step{'s' if len(steps) > 1 else ''} {some}"


def _stopped_ms(facts: Facts, rank: int, step: int) -> float:
    """Return how long a rank's process was stopped in the block of a step; 0 if unknown."""
    table = facts.run.steps
    if table is None or step not in table.step:
        return 0.0
    values = table.facts[table.block[int(np.flatnonzero(table.step == step)[0])]].get("stopped_us") or ()
    return float(values[rank] or 0.0) / 1e3 if rank < len(values) else 0.0


def _jitter(facts: Facts) -> Iterator[Finding]:
    if (stragglers := facts.stragglers) is None:
        return
    cost = stragglers.jitter_ms
    if cost.low <= max(LEAST_SHARE * stragglers.rounds.step_ms, LEAST_MS):
        return
    rounds, table = stragglers.rounds, facts.run.steps
    work = mended(rounds.work_ms, stragglers.late) - rounds.fewer_ms
    beyond = work.max(axis=0) - np.median(work, axis=0)
    last = np.argmax(work, axis=0)
    waited = np.bincount(last, weights=beyond, minlength=len(work))  # for each rank
    share = float(waited.max() / max(1e-12, waited.sum()))
    cause = "different ranks are late in different steps"
    if share >= _MOSTLY:
        chance = "" if stragglers.late else ", perhaps by chance"
        cause = f"{share:.0%} of it in steps that wait for rank {np.argmax(waited)}{chance}"
    advice = (
        "use fewer threads than cores, bind ranks to cores (mpirun --bind-to core), stop other programs on the hosts"
    )
    if facts.cores_explain(cost.value):
        advice = f"ranks wait for CPU cores: {facts.for_cores()}"
    for part in ("data", "gc", "forward", "backward"):
        if table is None or part not in table.parts_us or rounds.source != "stamps":
            continue
        times = rounds.mean_of(np.nan_to_num(table.parts_us[part])) / 1e3
        more = np.minimum((times - np.median(times, axis=0))[last, np.arange(len(last))], beyond)
        cure = _cure(facts, part) or (share >= _MOSTLY and f"see what slows {part} there: hvdtrain doctor on its host")
        if 2 * more.sum() > beyond.sum() and cure:
            cause, advice = f"{cause}; mostly by {part}", cure
    yield Finding("jitter", f"jitter costs {_ms(cost)} per step: {cause}", cost.value, advice)


def _ms(estimate: Estimate) -> str:
    return wording.quantity(estimate, unit=" ms")


def _seconds(ms: float) -> str:
    return f"{wording.ms(ms / 1e3)} s" if ms >= 1000 else f"{wording.ms(ms)} ms"


RULES_OF_RANKS = (_late, _fast, _shares, _division, _sizes, _padding, _stopped, _pauses, _jitter)
