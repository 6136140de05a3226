"""Stragglers: the ranks for which the others wait, and their cost; and pauses of ranks. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np

from hvdtrain.timeline import wording
from hvdtrain.timeline.analysis.analysis import Estimate
from hvdtrain.timeline.analysis.lateness import cost_estimates, latest, like_the_others, median_of_others, tamed
from hvdtrain.timeline.analysis.rank_steps import Rounds
from hvdtrain.timeline.analysis.stats import change_points, mean_of
from hvdtrain.timeline.columns import Floats

LEAST_ROUNDS = 8
"""With fewer, it is unknown whether there is a straggler."""
_KNOWN = 0.2
_MOSTLY = 0.7
_BEYOND = 1.5
_AS_MUCH, _ALIKE = 0.5, 1 / 3
_AHEAD = 1.25
"""A rank counts as early if it is so by more than this times what the latest one is late."""
_NONE = Estimate(0.0, 0.0, 0.0)

_PAUSE_STEPS = 3.0
_PAUSE_SHARE = 0.05
_FEW = 6
_OF_ALL = 0.2
"""Share of the steps. More frequent pauses are normal behaviour of the job."""


@dataclass(frozen=True)
class BatchSizes:
    """The effect of sizes, which count elements of the largest tensor of a batch.

    A step would be shorter by `cost_ms` if all ranks had equally much in it; `ms_per_1000` elements. The largest size
    of a step exceeds the mean of the ranks by the share `more`: median over steps.
    """

    cost_ms: Estimate
    ms_per_1000: float
    more: float


class Division(NamedTuple):
    """Micro-batches of each rank in a step, which are unequal, the mean wait of a rank for those with the most, and
    the median time that each rank works in a step.
    """

    passes: Sequence[int]
    cost_ms: float
    work_ms: Sequence[float]


@dataclass(frozen=True)
class Pause:
    """A rank that was much later than the others, by `ms` in total, in consecutive steps from `step` on, or in one."""

    rank: int
    step: int
    ms: float


@dataclass(frozen=True)
class Stragglers:
    """The result of the search for stragglers.

    `segments` are the same of the steps between changes, in order; empty if ranks were equally late all the time.
    """

    rounds: Rounds  # those used, without pauses
    cost_ms: Sequence[Estimate]  # per step, of each rank
    last_share: Floats  # share of the steps in which a rank was the last [ranks]
    steady: Sequence[int]  # ranks that are late in most steps, not rarely by much
    late: Sequence[int]  # stragglers with a statistically significant cost, most costly first
    jitter_ms: Estimate  # wait per step for the last rank beyond the median rank, without the stragglers' part
    pauses: Sequence[Pause]  # longest first
    reason: str  # why there is no straggler
    segments: Sequence[Stragglers] = ()
    sizes: BatchSizes | None = None  # effect of unequal batches, which make no stragglers
    division: Division | None = None  # effect of unequal numbers of micro-batches, which make none either
    fast: Sequence[int] = ()  # a minority that is earlier than the others, which are no stragglers for that
    ahead_ms: Estimate = _NONE  # of the median of these, before that of the others

    def late_in(self, rank: int) -> Stragglers:
        """Return what was found in the segments in which a rank is a straggler; the whole, if that is all of them."""
        own = [segment for segment in self.segments if self._is_late(segment, rank)]
        return self if len(own) == len(self.segments) else joined(own)

    def spells(self, rank: int) -> list[Stragglers]:
        """Return what was found in each stretch of segments in which a rank is a straggler; [] if in all of them."""
        by_state = groupby(self.segments, lambda each: self._is_late(each, rank))
        found = [joined(list(own)) for late, own in by_state if late]
        return found if self.late_in(rank) is not self else []

    def _is_late(self, segment: Stragglers, rank: int) -> bool:
        """Return whether a rank is one in a segment, or costs about as much there as where it is one."""
        costs = [each.cost_ms[rank].value for each in self.segments if rank in each.late]
        return rank in segment.late or segment.cost_ms[rank].value > _AS_MUCH * max(costs, default=math.inf)


def find_stragglers(rounds: Rounds, grain_ms: Sequence[float] = ()) -> Stragglers:
    """Find the ranks for which the others wait.

    Where the lateness of a rank changes, the steps before and after are judged on their own.

    A rank is a straggler on two conditions. Shuffled rank numbers rarely make any rank as late (`lateness.latest`),
    and the low end of its cost's confidence interval, less the clock error, is large enough. Then the search continues
    among the other ranks. Ranks that are late together, as those of a host, share their cost: it counts as one.

    A cost smaller than `grain_ms`, if it is given, does not count: what at least moves between ranks, a micro-batch, if
    these follow the speed of ranks.
    """
    rounds, pauses = _without_pauses(rounds)
    excess = rounds.work_ms - median_of_others(rounds.work_ms)
    changes = change_points(excess, rounds.least_ms)
    edges = [0, *changes, len(rounds.step)]
    parts = [rounds.take(np.arange(a, b, dtype=np.int32)) for a, b in pairwise(edges)] if changes else []
    segments = [_judged(part, pauses, grain_ms) for part in parts]
    if any(segment.late for segment in segments):
        return joined(segments)
    return _judged(rounds, pauses, grain_ms)


def _without_pauses(rounds: Rounds) -> tuple[Rounds, list[Pause]]:
    """Separate pauses from the other rounds.

    Their steps are too few for the test with shuffled rank numbers, and do not need it.
    """
    excess = rounds.work_ms - median_of_others(rounds.work_ms)
    excess = (excess - np.median(excess, axis=1, keepdims=True)) * rounds.length
    long = excess > _PAUSE_STEPS * rounds.step_ms * np.sqrt(rounds.length)  # noise grows like that
    count = long.shape[1]
    few = max(min(_FEW, count // 4), _PAUSE_SHARE * count)
    long &= long.sum(axis=1, keepdims=True) <= few
    aside = long.any(axis=0)
    if not aside.any() or aside.sum() > max(few, _OF_ALL * count):
        return rounds, []
    pauses: list[Pause] = []
    last = (-1, -1)
    for rank, place in np.argwhere(long).tolist():  # by rank, then by step: a pause may continue in the next step
        step, ms = int(rounds.step[place]), float(excess[rank, place])
        if pauses and last == (rank, step - 1):
            pauses[-1] = replace(pauses[-1], ms=pauses[-1].ms + ms)
        else:
            pauses.append(Pause(rank, step, ms))
        last = (rank, step)
    return rounds.take(np.flatnonzero(~aside).astype(np.int32)), sorted(pauses, key=lambda pause: -pause.ms)


def joined(segments: Sequence[Stragglers]) -> Stragglers:
    """Return what was found in segments as that of all their steps."""
    rounds = segments[0].rounds.joined([segment.rounds for segment in segments[1:]])
    shares = [float(segment.rounds.weight.sum() / rounds.weight.sum()) for segment in segments]
    cost = [weighed_mean([each.cost_ms[rank] for each in segments], shares) for rank in range(len(rounds.hosts))]
    last = sum(share * each.last_share for share, each in zip(shares, segments, strict=True))
    return Stragglers(
        rounds=rounds,
        cost_ms=cost,
        last_share=np.asarray(last),
        steady=sorted({rank for each in segments for rank in each.steady}),
        late=sorted({rank for each in segments for rank in each.late}, key=lambda rank: -cost[rank].value),
        jitter_ms=weighed_mean([segment.jitter_ms for segment in segments], shares),
        pauses=segments[0].pauses,
        reason="",
        segments=segments,
        fast=sorted(set(segments[0].fast).intersection(*(each.fast for each in segments))),
        ahead_ms=weighed_mean([segment.ahead_ms for segment in segments], shares),
    )


def weighed_mean(parts: Sequence[Estimate], shares: Sequence[float]) -> Estimate:
    """Return the mean of independent estimates by shares that sum to 1."""
    value = sum(share * part.value for share, part in zip(shares, parts, strict=True))
    below = math.hypot(*(share * (part.value - part.low) for share, part in zip(shares, parts, strict=True)))
    above = math.hypot(*(share * (part.high - part.value) for share, part in zip(shares, parts, strict=True)))
    return Estimate(value, value - below, value + above)


def _judged(rounds: Rounds, pauses: Sequence[Pause], grain_ms: Sequence[float]) -> Stragglers:
    work = rounds.work_ms
    ranks, count = work.shape
    found, fast, alike = _unlike_others(work) if count >= LEAST_ROUNDS else ([], [], 1.0)
    grain = grain_ms or [0.0] * ranks
    matters = [max(rounds.least_ms, *each) for each in zip(rounds.clock_error_ms.tolist(), grain, strict=True)]
    while True:
        estimates, whole, steady = _costs(rounds, found, alike)
        estimates = _within_waits(estimates, found, sum(estimates[rank].value for rank in found), rounds)
        doubt = (rounds.clock_error_ms + np.median(rounds.clock_error_ms)).tolist()
        cost = _doubted(estimates, doubt)
        kept = [rank for rank in found if cost[rank].low > matters[rank]]
        named = sorted({*kept, *_together(found, estimates, doubt, matters)})
        if named == sorted(found):
            break
        found = named
    shown = _shown_alone(rounds, found, np.add(doubt, matters).tolist())
    cost = [shown.get(rank, each) for rank, each in enumerate(cost)]
    found = sorted([*found, *shown], key=lambda rank: -cost[rank].value)
    usual = mended(work, found)
    jitter = mean_of((usual - rounds.fewer_ms).max(axis=0) - np.median(usual, axis=0), rounds.weight)
    last = np.bincount(np.argmax(work - rounds.fewer_ms, axis=0), rounds.weight, ranks) / rounds.weight.sum()
    reason = "" if found else _why_none(count, [*cost, *_doubted(whole, doubt)], matters, pauses)
    ahead = _NONE
    if fast:
        each = np.median(np.delete(work, fast, axis=0), axis=0) - np.median(work[fast], axis=0)
        (ahead,) = _doubted([mean_of(each, rounds.weight)], [max(doubt[rank] for rank in fast)])
    return Stragglers(rounds, cost, last, steady, found, jitter, pauses, reason, fast=sorted(fast), ahead_ms=ahead)


def mended(work: Floats, late: Sequence[int]) -> Floats:
    """Return the work of ranks as if those that are `late` were like the others [ranks, rounds]."""
    found: Floats = work.copy()
    found[list(late)] = like_the_others(work, late)[list(late)]
    return found


def _together(
    ranks: Sequence[int], costs: Sequence[Estimate], doubt: Sequence[float], matters: Sequence[float]
) -> list[int]:
    """Return the most costly ranks of about equal cost if they matter together, though none may alone; else []."""
    most = max((costs[rank].value for rank in ranks), default=0.0)
    alike = [rank for rank in ranks if costs[rank].value >= _ALIKE * most and costs[rank].low > 0]
    if len(alike) < 2:
        return []
    low = sum(costs[rank].low for rank in alike) - max(doubt[rank] for rank in alike)
    return alike if low > max(matters[rank] for rank in alike) else []


def _shown_alone(rounds: Rounds, late: Sequence[int], least: Sequence[float]) -> dict[int, Estimate]:
    """Return other ranks that a part of their time shows to be late, and what that part costs if more than `least`."""
    work, found = rounds.work_ms, dict[int, Estimate]()
    for part in rounds.alone_ms if work.shape[1] >= LEAST_ROUNDS else ():
        more = (part - median_of_others(part)).mean(axis=1)
        for rank in _unlike_others(part)[0] if (more > least).any() else ():
            mended = work.copy()
            mended[rank] -= (part - like_the_others(part))[rank]
            saved = mean_of(work.max(axis=0) - mended.max(axis=0), rounds.weight)
            (cost,) = _within_waits([saved], [rank], saved.value, rounds)
            if cost.low > least[rank] and rank not in late:
                found[rank] = cost
    return found


def _within_waits(costs: Sequence[Estimate], late: Sequence[int], total: float, rounds: Rounds) -> list[Estimate]:
    """Return costs less what ranks that are `late`, and cost `total`, seem to cost beyond the waits of the others."""
    known = np.isfinite(rounds.wait_ms).all(axis=0)
    waits, weight = np.delete(rounds.wait_ms, late, axis=0)[:, known], rounds.weight[known]
    waited = float((waits @ weight).max(initial=0.0) / weight.sum()) if known.any() else math.inf
    share = min(1.0, waited / total) if total > 0 else 1.0
    return [Estimate(share * cost.value, share * cost.low, share * cost.high) for cost in costs]


def _doubted(estimates: Sequence[Estimate], doubt: Sequence[float]) -> list[Estimate]:
    return [Estimate(each.value, each.low - ms, each.high + ms) for each, ms in zip(estimates, doubt, strict=True)]


def _costs(rounds: Rounds, late: Sequence[int], alike: float) -> tuple[list[Estimate], list[Estimate], list[int]]:
    """Return the cost of each rank, the cost as the mean over all steps, and the ranks with a steady cost.

    The cost is the mean over all steps if that is precise. If outliers make it uncertain, the times without outliers
    give the cost (`lateness.tamed`). Exceptions: outliers count for a rank that is late rarely and by much, far beyond
    its steady lateness; and if nearly every step has an outlier of some rank, as with many ranks.
    """
    work, tame_work = rounds.work_ms, tamed(rounds.work_ms)
    tame, whole = (cost_estimates(each, late, alike, rounds.weight, rounds.fewer_ms) for each in (tame_work, work))
    steady: list[int] = []
    if np.mean((tame_work != work).any(axis=0)) > _MOSTLY:
        return whole, whole, steady
    for rank, (low, all_of_it) in enumerate(zip(tame, whole, strict=True)):
        known = all_of_it.high - all_of_it.value <= _KNOWN * all_of_it.value
        if not known and all_of_it.low <= _BEYOND * low.high:
            steady.append(rank)
    return [tame[rank] if rank in steady else whole[rank] for rank in range(len(work))], whole, steady


def _why_none(count: int, costs: Sequence[Estimate], matters: Sequence[float], pauses: Sequence[Pause]) -> str:
    """Say why there is no straggler. `costs` has that of each rank, then that of each as the mean over all steps."""
    apart = " (without pauses)" if pauses else ""
    if count < LEAST_ROUNDS:
        few = f"1 step{apart} is" if count == 1 else f"{count} steps{apart} are"
        return f"{few} too few to tell a straggler from chance"
    place = max(range(len(costs)), key=lambda each: costs[each].value)
    worst, rank = costs[place], place % (len(costs) // 2)
    if not math.isfinite(worst.low):
        return f"the cost of rank {rank} is unknown: its clock was never compared with the others'"
    if worst.value < matters[rank]:
        return f"no rank costs more than {wording.ms(matters[rank])} ms per step{apart}"
    why = f"the interval is {wording.interval(worst)}, and less than {wording.ms(matters[rank])} does not count"
    if worst.low > matters[rank]:
        why = "ranks with shuffled numbers are as late too often"
    return f"rank {rank}'s {wording.ms(worst.value)} ms per step{apart} may be chance: {why}"


def _unlike_others(work: Floats) -> tuple[list[int], list[int], float]:
    """Return significantly late ranks, a minority of early ones, and how alike steps are.

    Repeated without these ranks until there are none. To a few early ranks, all others seem late.
    """
    late: list[int] = []
    fast: list[int] = []
    alike = 1.0
    while len(rest := [rank for rank in range(len(work)) if rank not in late and rank not in fast]) >= 2:
        mean = (work[rest] - median_of_others(work[rest])).mean(axis=1)
        if len(rest) > 2 and -mean.min() > _AHEAD * mean.max():
            places, _ = latest(-work[rest])
            if places and 2 * (len(fast) + len(places)) < len(work) - len(late):
                fast += [rest[place] for place in places]
                continue
        places, correlation = latest(work[rest])
        alike = max(alike, correlation)
        if not places:
            break
        late += [rest[place] for place in places]
    return late, fast, alike
