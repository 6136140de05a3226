"""Which rank the others wait for, and what it costs. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hvdtrain.timeline import wording
from hvdtrain.timeline.analysis.analysis import Estimate
from hvdtrain.timeline.analysis.lateness import cost_estimates, like_the_others, median_of_others, tamed
from hvdtrain.timeline.analysis.rank_steps import Rounds
from hvdtrain.timeline.analysis.significance import latest
from hvdtrain.timeline.analysis.stats import mean_of
from hvdtrain.timeline.columns import Floats

_PAUSE_STEPS = 3.0
_PAUSE_SHARE = 0.05
_FEW = 6
_OF_ALL = 0.2
"""Of the steps: where pauses of any rank are in more, they are how this job runs."""
_LEAST_ROUNDS = 8
_KNOWN = 0.2
_MOSTLY = 0.7
_BEYOND = 1.5
_LEAST_SHARE = 0.01
_LEAST_MS = 0.2
"""A cost below this, or below that share of a step, is not worth a name."""


@dataclass(frozen=True)
class Pause:
    """A rank that was much later than the others, in a step or in several that follow each other.

    Attributes:
        rank, step: which; the first one.
        ms: later than the others.
    """

    rank: int
    step: int
    ms: float


@dataclass(frozen=True)
class Verdict:
    """What the rounds of all ranks say.

    Attributes:
        rounds: that were looked at, without pauses.
        cost_ms: a step, of each rank.
        last_share: of the steps in which a rank was the last [ranks].
        steady: ranks that are late in most steps, not seldom and by much.
        late: ranks of which the evidence is not noise, most costly first.
        jitter_ms: what steps wait for the last rank longer than for the middle one, were no rank late.
        pauses: longest first.
        reason: why nobody is named, where nobody is.
    """

    rounds: Rounds
    cost_ms: Sequence[Estimate]
    last_share: Floats
    steady: Sequence[int]
    late: Sequence[int]
    jitter_ms: Estimate
    pauses: Sequence[Pause]
    reason: str


def judge(rounds: Rounds) -> Verdict:
    """Say which ranks are late.

    A rank is named where shuffled names seldom make any rank so late (`evidence.latest`) and where even the low end of
    its cost's confidence interval, less what the clocks may be off, is worth a name. Then the others are looked at
    without it.
    """
    rounds, pauses = _without_pauses(rounds)
    work = rounds.work_ms
    ranks, count = work.shape
    found, alike = _later_than_others(work) if count >= _LEAST_ROUNDS else ([], 1.0)
    least = max(_LEAST_MS, _LEAST_SHARE * rounds.step_ms)
    matters = [max(least, error_ms) for error_ms in rounds.clock_error_ms.tolist()]
    while True:
        estimates, whole, steady = _costs(work, found, alike)
        doubt = (rounds.clock_error_ms + np.median(rounds.clock_error_ms)).tolist()
        cost = _doubted(estimates, doubt)
        kept = [rank for rank in found if cost[rank].low > matters[rank]]
        if kept == found:
            break
        found = kept
    found = sorted(found, key=lambda rank: -cost[rank].value)
    mended = work.copy()
    mended[found] = like_the_others(work, found)[found]
    jitter = mean_of(mended.max(axis=0) - np.median(mended, axis=0))
    last = np.bincount(np.argmax(work, axis=0), minlength=ranks) / count
    reason = "" if found else _why_nobody(count, [*cost, *_doubted(whole, doubt)], matters, pauses)
    return Verdict(rounds, cost, last, steady, found, jitter, pauses, reason)


def _doubted(estimates: Sequence[Estimate], doubt: Sequence[float]) -> list[Estimate]:
    return [Estimate(each.value, each.low - ms, each.high + ms) for each, ms in zip(estimates, doubt, strict=True)]


def _costs(work: Floats, late: Sequence[int], alike: float) -> tuple[list[Estimate], list[Estimate], list[int]]:
    """What each rank costs; what it does by the mean over all steps; and the ranks whose cost is a steady one.

    The mean over all steps says it, where there are enough of them to know it well. Elsewhere outliers, which are
    nobody's habit, make it uncertain: then it is that of times without them (`lateness.tamed`). But a rank that is late
    seldom and by much has no other cost than its outliers: they count where they are far beyond what is steady. And
    where nearly every step has an outlier of some rank, as among many ranks, what one costs is as much less.
    """
    tame_work = tamed(work)
    tame, whole = cost_estimates(tame_work, late, alike), cost_estimates(work, late, alike)
    steady: list[int] = []
    if np.mean((tame_work != work).any(axis=0)) > _MOSTLY:
        return whole, whole, steady
    for rank, (low, all_of_it) in enumerate(zip(tame, whole, strict=True)):
        known = all_of_it.high - all_of_it.value <= _KNOWN * all_of_it.value
        if not known and all_of_it.low <= _BEYOND * low.high:
            steady.append(rank)
    return [tame[rank] if rank in steady else whole[rank] for rank in range(len(work))], whole, steady


def _why_nobody(count: int, costs: Sequence[Estimate], matters: Sequence[float], pauses: Sequence[Pause]) -> str:
    """Say why no rank is named.

    Args:
        count: steps that were looked at.
        costs: of each rank, then of each rank by the mean over all steps: what few steps cost is not denied.
        matters: what a rank has to cost at least, in milliseconds.
        pauses: what was left out.
    """
    apart = " but for pauses" if pauses else ""
    if count < _LEAST_ROUNDS:
        few = f"1 step{apart} is" if count == 1 else f"{count} steps{apart} are"
        return f"{few} too few to tell a late rank from chance"
    place = max(range(len(costs)), key=lambda each: costs[each].value)
    worst, rank = costs[place], place % (len(costs) // 2)
    if not math.isfinite(worst.low):
        return f"what rank {rank} costs is not known: its clock was never compared with the others'"
    if worst.value < matters[rank]:
        return f"no rank costs more than {wording.ms(matters[rank])} ms a step{apart}"
    why = f"it is somewhere in {wording.interval(worst)}, and below {wording.ms(matters[rank])} it does not matter"
    if worst.low > matters[rank]:
        why = "with their names shuffled, ranks are as late too often"
    return f"rank {rank}'s {wording.ms(worst.value)} ms a step{apart} may be chance: {why}"


def _later_than_others(work: Floats) -> tuple[list[int], float]:
    """Ranks that are late for no accident, and how alike steps are: again without those that are, until none is."""
    found: list[int] = []
    alike = 1.0
    while len(work) - len(found) >= 2:
        rest = [rank for rank in range(len(work)) if rank not in found]
        places, correlation = latest(work[rest])
        alike = max(alike, correlation)
        if not places:
            break
        found += [rest[place] for place in places]
    return found, alike


def _without_pauses(rounds: Rounds) -> tuple[Rounds, list[Pause]]:
    """Set the few steps aside in which a rank was later by several whole steps: told by themselves, not as a mean.

    They are too few to prove by the shuffling of names whose they are, and need no such proof.
    """
    excess = rounds.work_ms - median_of_others(rounds.work_ms)
    long = excess > _PAUSE_STEPS * rounds.step_ms
    count = long.shape[1]
    few = max(min(_FEW, count // 4), _PAUSE_SHARE * count)
    long &= long.sum(axis=1, keepdims=True) <= few
    aside = long.any(axis=0)
    if not aside.any() or aside.sum() > max(few, _OF_ALL * count):
        return rounds, []
    pauses: list[Pause] = []
    last = (-1, -1)
    for rank, place in np.argwhere(long).tolist():  # by rank, then in order: a pause may reach into the next step
        step, ms = int(rounds.step[place]), float(excess[rank, place])
        if pauses and last == (rank, step - 1):
            pauses[-1] = replace(pauses[-1], ms=pauses[-1].ms + ms)
        else:
            pauses.append(Pause(rank, step, ms))
        last = (rank, step)
    keep = np.flatnonzero(~aside)
    column = rounds.column[keep] if len(rounds.column) else rounds.column
    rest = replace(rounds, work_ms=rounds.work_ms[:, keep], column=column, step=rounds.step[keep])
    return rest, sorted(pauses, key=lambda pause: -pause.ms)
