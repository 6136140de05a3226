"""Pauses: the few steps in which a rank is later than the others by several whole steps. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hvdtrain.timeline.analysis.lateness import median_of_others
from hvdtrain.timeline.analysis.rank_steps import Rounds

_PAUSE_STEPS = 3.0
_PAUSE_SHARE = 0.05
_FEW = 6
_OF_ALL = 0.2
"""Share of the steps. More frequent pauses are normal behaviour of the job."""


@dataclass(frozen=True)
class Pause:
    """A rank that was much later than the others, by `ms` in total, in consecutive steps from `step` on, or in one."""

    rank: int
    step: int
    ms: float


def without_pauses(rounds: Rounds) -> tuple[Rounds, list[Pause]]:
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
    rest = rounds.take(np.flatnonzero(~aside).astype(np.int32))
    return rest, sorted(pauses, key=lambda pause: -pause.ms)
