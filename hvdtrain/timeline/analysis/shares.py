"""Micro-batches by the speed of ranks, and the stragglers of a start that may have them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.timeline.analysis.batch_sizes import BatchSizes, without_sizes
from hvdtrain.timeline.analysis.rank_steps import from_stamps
from hvdtrain.timeline.analysis.stragglers import Stragglers, find_stragglers
from hvdtrain.timeline.columns import StepTable


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


def stragglers_of(table: StepTable, shares: Sequence[Mapping[str, Any]]) -> tuple[Stragglers, BatchSizes | None] | None:
    """Find the stragglers of a start without the effect of batch sizes; return also that effect.

    Where micro-batches follow the speed of ranks, sizes are no chance, and stay; what was before does not count.
    None if the stamps do not compare ranks.
    """
    rounds = from_stamps(table)
    if rounds is None:
        return None
    if not shares:
        rounds, sizes = without_sizes(rounds, table)
        return find_stragglers(rounds), sizes
    last = last_shares(shares, len(table.hosts))
    begun = min((at for event in shares if isinstance(at := event.get("at_step"), int)), default=0)
    kept = np.flatnonzero(rounds.step > begun)
    if last is None or not len(kept):
        return find_stragglers(rounds), None
    return find_stragglers(rounds.take(kept.astype(np.int32)), last.pass_ms), None
