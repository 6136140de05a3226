"""Whether a rank is later than the others, or only happened to be. Pure, and the same at each call."""

from __future__ import annotations

import math

import numpy as np

from hvdtrain.timeline.analysis.lateness import median_of_others, tamed
from hvdtrain.timeline.analysis.stats import correlation_steps, student
from hvdtrain.timeline.columns import Floats

_SHUFFLES = 2000
_TOGETHER = 50
_MOST_BLOCKS = 64
_ENOUGH_RANKS = 8
_FAR = 10.0
_ODDS = 0.0025
"""Of naming a rank where none is late, of each of two tests: half a percent in all."""
_REACHED = int(_ODDS * (_SHUFFLES + 1)) - 1
"""So many shuffles may make a rank as late as one that is named; it is itself as likely as each of them."""
_Z = 2.807034
"""At which a normal number is exceeded with these odds."""


def latest(work: Floats) -> tuple[list[int], float]:
    """The ranks that are later than the others by no accident, and how alike steps are.

    Two statistics of how late a rank is, each against what is usual in its step (the median of the others): the mean,
    which sees a rank that is late seldom and by much; and the mean of times without their outliers
    (`lateness.tamed`), which sees a small steady lateness among them. Each is compared with those that
    come out when ranks change their names in each block of steps, of the rank that then is the latest: so having
    looked for the latest of many ranks is part of the odds, for all ranks at once (a permutation test of the largest
    statistic; Westfall and Young, Resampling-based multiple testing, 1993). Late ranks are among those whose
    names are shuffled, which hides others and makes none late: without these it may find more. Half of all are told at
    most, the latest: where one is quicker than the others, all but it are later than their median. Where there are too
    few blocks to shuffle, a rank's mean is tested against its own scatter and against the other ranks' means, the odds
    divided by the number of ranks.

    Args:
        work: of each rank in each step [ranks, steps], two ranks at least.

    Returns:
        Ranks that are late, the latest first, and how many steps say as much as one independent one.
    """
    steady = tamed(work)
    excess = [values - median_of_others(values) for values in (steady, work)]
    alike = correlation_steps(excess[0] - excess[0].mean(axis=1, keepdims=True))
    ranks, steps = work.shape
    blocks = int(min(_MOST_BLOCKS, steps // math.ceil(2 * alike - 1)))
    # With 2 ranks half of the shuffles of the other blocks are no other than their mirror images.
    if blocks * math.log(ranks) < 2 * math.log(ranks / _ODDS):
        late = np.maximum(_by_scatter(excess[0], alike), _by_scatter(excess[1], alike))
    else:
        late = _by_shuffles(excess[0], excess[1], blocks)
    order = [rank for rank in np.argsort(-late).tolist() if late[rank] > 0]
    return order[: ranks // 2], alike


def _by_shuffles(steady: Floats, whole: Floats, blocks: int) -> Floats:
    """By how much ranks are late that in one of both are so more than shuffled names make any; others' is 0 [ranks]."""
    both = steady + 1j * whole  # shuffled together, as that is what takes long
    parts = np.array([part.mean(axis=1) for part in np.array_split(both, blocks, axis=1)]).T
    means = np.stack([parts.mean(axis=1).real, parts.mean(axis=1).imag])
    generator = np.random.default_rng(0)
    highest = np.empty((2, 0))
    for _ in range(_SHUFFLES // _TOGETHER):
        shuffled = generator.permuted(np.broadcast_to(parts, (_TOGETHER, *parts.shape)), axis=1).mean(axis=2)
        highest = np.append(highest, [shuffled.real.max(axis=1), shuffled.imag.max(axis=1)], axis=1)
        reached = (highest >= means.max(axis=1, keepdims=True)).sum(axis=1)
        if reached.min() > _REACHED:
            return np.zeros(len(steady))
    least = np.maximum(0.0, np.sort(highest, axis=1)[:, -1 - _REACHED, None])
    return np.asarray(np.where(means > least, means, 0.0).max(axis=0))


def _by_scatter(values: Floats, alike: float) -> Floats:
    """The same of the latest ranks, as far as each is late for itself or beside the others."""
    means = values.mean(axis=1)
    found = np.zeros(len(means))
    for rank in np.argsort(-means).tolist():
        if means[rank] <= 0 or not (_beside_itself(values[rank], alike, len(means)) or _beside_others(means, rank)):
            break
        found[rank] = means[rank]
    return found


def _beside_itself(values: Floats, alike: float, ranks: int) -> bool:
    """Whether a rank's mean is further from 0 than its own scatter explains: Student's t test.

    Where values resemble each other, their variance within a short stretch is less than it would be in a long one, and
    squares are independent sooner than the values themselves.
    """
    steps, scatter = len(values), float(values.std(ddof=1))
    if values.mean() > _FAR * scatter:  # no drift, however alike the steps are
        return True
    if steps < 2 * alike:
        return False
    r = (alike - 1) / (alike + 1)
    degrees = steps * (1 - r * r) / (1 + r * r) - 1
    error = scatter / math.sqrt((1 - alike / steps) * steps / alike)
    return bool(values.mean() > student(degrees, z=_z(ranks)) * error)


def _beside_others(means: Floats, rank: int) -> bool:
    """Whether a rank's mean is further from the others' than these are from each other, however alike its steps are."""
    if len(means) < _ENOUGH_RANKS:
        return False
    others = np.delete(means, rank)
    middle = float(np.median(others))
    scatter = 1.4826 * float(np.median(np.abs(others - middle)))
    return bool(means[rank] - middle > student(len(others) / 2, z=_z(len(means))) * scatter)


def _z(ranks: int) -> float:
    """The normal quantile of the odds divided by the ranks, to first order in their logarithm."""
    return math.sqrt(_Z**2 + 2 * math.log(ranks))
