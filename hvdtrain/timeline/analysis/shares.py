"""Stragglers of a start without the effect of unequal work: micro-batches by speed, batches of other sizes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.comm.dimensions import Dimensions
from hvdtrain.data.order import Workers
from hvdtrain.observe.cost import as_mapping
from hvdtrain.timeline.analysis.rank_steps import Rounds, from_stamps
from hvdtrain.timeline.analysis.stats import mean_of
from hvdtrain.timeline.analysis.stragglers import LEAST_ROUNDS, BatchSizes, Division, Stragglers, find_stragglers
from hvdtrain.timeline.columns import Floats, StepTable

_AS_LONG, _SLOWER = 0.9, 1.1
"""Shares of a rank's time in a step, and of that of one of its micro-batches, beyond which it is slow itself."""


class Shares(NamedTuple):
    """Micro-batches by the speed of ranks, after `at_step`; by rank, their number and the time of one."""

    at_step: int
    shares: Sequence[float]
    pass_ms: Sequence[float]


def last_shares(events: Sequence[Mapping[str, Any]], size: int) -> Shares | None:
    """Return the last of a start's events ``shares``; None without any, or if it is invalid."""
    for event in events[-1:]:
        at_step, shares, pass_s = (event.get(name) for name in ("at_step", "shares", "pass_s"))
        lists = [each for each in (shares, pass_s) if isinstance(each, list) and len(each) == size > 1]
        numbers = [each for values in lists for each in values if isinstance(each, (int, float)) and each > 0]
        if isinstance(at_step, int) and len(numbers) == 2 * size:
            return Shares(at_step, numbers[:size], [1e3 * each for each in numbers[size:]])
    return None


def workers_of(config: Mapping[str, Any], size: int) -> Workers | None:
    """Return the workers that train apart, with their shares of the micro-batches; None if there are none."""
    count, text = as_mapping(config.get("parallel")).get("workers"), as_mapping(config.get("outer")).get("shares")
    if not isinstance(count, int) or count < 1:
        return None
    parts = tuple(int(part) for part in str(text).split(",") if part.isdecimal())
    return Workers(count, size, parts if len(parts) == count and min(parts) > 0 else ())


def passes_by_rank(config: Mapping[str, Any], size: int) -> list[int]:
    """Return the micro-batches of each rank in a step, if the options make them unequal; else none.

    Ranks of FSDP, and those that divide the model, repeat some to have equally many.
    """
    train, parallel = (as_mapping(config.get(name)) for name in ("train", "parallel"))
    batch, micro = train.get("global_batch"), train.get("micro_batch")
    usual = {"engine": ("horovod", "ddp"), "balance": ("equal",)}
    if not (isinstance(batch, int) and isinstance(micro, int) and batch > 0 and micro > 0) or Dimensions.of(parallel):
        return []
    if any(parallel.get(name, values[0]) not in values for name, values in usual.items()):
        return []
    workers = workers_of(config, size) or Workers(size, size)
    found = [sum(map(len, workers.shares(-(-batch // micro), rank))) for rank in range(size)]
    return found if len(set(found)) > 1 else []


def without_passes(rounds: Rounds, passes: Sequence[int]) -> tuple[Rounds, Division]:
    """Remove what the numbers of micro-batches explain: the usual time of the ranks with equally many.

    Of two ranks the faster one is usual. A rank with a number of its own is compared only where fewer micro-batches
    take as long, or one of its own much longer than one of the others: then the fastest rate is usual for all.
    """
    own, work = np.array(passes), np.median(rounds.work_ms, axis=1)
    usual = {count: float(np.quantile(work[own == count], 0.5, method="lower")) for count in set(passes)}
    most, rate = max(usual), {count: ms / count for count, ms in usual.items() if count}
    fewer_as_long = any(usual[count] > _AS_LONG * usual[most] for count in usual if count < most)
    if fewer_as_long or rate[most] > _SLOWER * min(rate.values()):
        usual = {count: count * min(rate.values()) for count in usual}
    later = np.array([usual[most] - usual[count] for count in passes])
    fewer = later[:, None]
    equal = replace(rounds, work_ms=rounds.work_ms + fewer, fewer_ms=fewer, alone_ms=rounds.alone_ms[:0])
    return equal, Division(passes, float(later.mean()), work.tolist())


def stragglers_of(
    table: StepTable, shares: Sequence[Mapping[str, Any]], config: Mapping[str, Any]
) -> Stragglers | None:
    """Find the stragglers of a start without the effect of batch sizes and of unequal passes, which are noted.

    Where micro-batches follow the speed of ranks, sizes are no chance, and stay; what was before does not count.
    None if the stamps do not compare ranks.
    """
    rounds = from_stamps(table)
    if rounds is None:
        return None
    found = _found(rounds, table, shares, config)
    # Of workers apart, a spell may be shorter than the time between exchanges.
    if rounds.length.max() == 1 or (parts := from_stamps(table, divides=True)) is None:
        return found
    of_parts = _found(parts, table, shares, config)
    return of_parts if of_parts.segments or len(rounds.step) < LEAST_ROUNDS else found


def _found(
    rounds: Rounds, table: StepTable, shares: Sequence[Mapping[str, Any]], config: Mapping[str, Any]
) -> Stragglers:
    if not shares:
        passes, division = passes_by_rank(config, len(table.hosts)), None
        rounds, sizes = without_sizes(rounds, table, passes)
        if passes:
            rounds, division = without_passes(rounds, passes)
        return replace(find_stragglers(rounds), sizes=sizes, division=division)
    rounds = replace(rounds, alone_ms=rounds.alone_ms[:0])  # a rank with more micro-batches waits for data more often
    last = last_shares(shares, len(table.hosts))
    begun = min((at for event in shares if isinstance(at := event.get("at_step"), int)), default=0)
    kept = np.flatnonzero(rounds.step > begun)
    if last is None or not len(kept):
        return find_stragglers(rounds)
    return find_stragglers(rounds.take(kept.astype(np.int32)), last.pass_ms)


def without_sizes(rounds: Rounds, table: StepTable, passes: Sequence[int] = ()) -> tuple[Rounds, BatchSizes | None]:
    """Return rounds with the times that ranks would have with batches of equal size, and the effect of sizes.

    Of ranks with unequal `passes`, micro-batches of equal size.

    The time of an element is the slope of a regression with fixed effects of ranks and steps, so that a slow rank or a
    slow step does not change it. Unless the low end of the cost's interval matters, rounds stay as they are.

    `rounds` are those of the stamps in `table`, which may lack sizes.
    """
    if not len(table.elements):
        return rounds, None
    work, elements = rounds.work_ms, rounds.mean_of(table.elements)
    if passes:
        elements = elements - elements.sum(axis=0).mean() * (np.array(passes) / sum(passes) - 1 / len(passes))[:, None]
    sizes, times = _within(elements), _within(work)
    power = float(np.sum(sizes**2))
    if power <= 0:
        return rounds, None
    slope = float(np.sum(sizes * times)) / power
    mean = elements.mean(axis=0)
    equal = work - slope * (elements - mean)
    cost = mean_of(work.max(axis=0) - equal.max(axis=0), rounds.weight)
    if slope <= 0 or cost.low < rounds.least_ms:
        return rounds, None
    more = float(np.median(elements.max(axis=0) / np.maximum(mean, 1e-9))) - 1
    return replace(rounds, work_ms=equal), BatchSizes(cost, 1e3 * slope, more)


def _within(values: Floats) -> Floats:
    """Return values without the means of their rows and columns."""
    return np.asarray(values - values.mean(axis=0) - values.mean(axis=1, keepdims=True) + values.mean())
