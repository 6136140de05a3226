"""Statistical tests for late ranks. Pure and deterministic."""

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
"""Probability of a false alarm of each of two tests: 0.5% in total."""
_REACHED = int(_ODDS * (_SHUFFLES + 1)) - 1
"""How many shuffles may reach the lateness of a straggler."""
_Z = 2.807034
"""Normal quantile of `_ODDS`."""


def latest(work: Floats) -> tuple[list[int], float]:
    """Return the ranks that are significantly later than the others, and how alike steps are.

    There are two statistics of lateness, both relative to the median of the other ranks in the step. The mean detects a
    rank that is late rarely and by much. The mean without outliers (`lateness.tamed`) detects a small steady lateness.
    Each is compared with the latest rank after shuffling the ranks in each block of steps. That accounts for having
    searched many ranks: a permutation test of the largest statistic (Westfall and Young, Resampling-based multiple
    testing, 1993).

    Late ranks take part in the shuffling. That hides others but makes none late, so a repetition without them may find
    more. At most half of the ranks are returned: if one rank is faster, all others are later than their median. With
    too few blocks to shuffle, a rank's mean is tested against its own scatter and the other ranks' means, with the
    probability divided by the number of ranks.

    Args:
        work: of each rank in each step [ranks, steps], at least two ranks.

    Returns:
        Late ranks, the latest first, and how many steps are worth one independent step.
    """
    steady = tamed(work)
    excess = [values - median_of_others(values) for values in (steady, work)]
    alike = correlation_steps(excess[0] - excess[0].mean(axis=1, keepdims=True))
    ranks, steps = work.shape
    blocks = int(min(_MOST_BLOCKS, steps // math.ceil(2 * alike - 1)))
    # With 2 ranks, half of the shuffles are mirror images of the others.
    if blocks * math.log(ranks) < 2 * math.log(ranks / _ODDS):
        late = np.maximum(_by_scatter(excess[0], alike), _by_scatter(excess[1], alike))
    else:
        late = _by_shuffles(excess[0], excess[1], blocks)
    order = [rank for rank in np.argsort(-late).tolist() if late[rank] > 0]
    return order[: ranks // 2], alike


def _by_shuffles(steady: Floats, whole: Floats, blocks: int) -> Floats:
    """Return the lateness of ranks that exceed all but a few shuffles in either statistic; 0 for others [ranks]."""
    both = steady + 1j * whole  # shuffled together, because shuffling is slow
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
    """Return the lateness of ranks that exceed their own scatter or that of the other ranks; 0 for others [ranks]."""
    means = values.mean(axis=1)
    found = np.zeros(len(means))
    for rank in np.argsort(-means).tolist():
        if means[rank] <= 0 or not (
            _exceeds_own_scatter(values[rank], alike, len(means)) or _exceeds_others(means, rank)
        ):
            break
        found[rank] = means[rank]
    return found


def _exceeds_own_scatter(values: Floats, alike: float, ranks: int) -> bool:
    """Return whether a rank's mean exceeds its own scatter: Student's t test for autocorrelated values.

    The variance of correlated values is smaller in a short stretch. Squares decorrelate faster than the values.
    """
    steps, scatter = len(values), float(values.std(ddof=1))
    if values.mean() > _FAR * scatter:  # too large for a drift
        return True
    if steps < 2 * alike:
        return False
    r = (alike - 1) / (alike + 1)
    degrees = steps * (1 - r * r) / (1 + r * r) - 1
    error = scatter / math.sqrt((1 - alike / steps) * steps / alike)
    return bool(values.mean() > student(degrees, z=_z(ranks)) * error)


def _exceeds_others(means: Floats, rank: int) -> bool:
    """Return whether a rank's mean exceeds the scatter of the other ranks' means."""
    if len(means) < _ENOUGH_RANKS:
        return False
    others = np.delete(means, rank)
    middle = float(np.median(others))
    scatter = 1.4826 * float(np.median(np.abs(others - middle)))
    return bool(means[rank] - middle > student(len(others) / 2, z=_z(len(means))) * scatter)


def _z(ranks: int) -> float:
    """Return the normal quantile of `_ODDS` divided by the ranks, to first order in the logarithm."""
    return math.sqrt(_Z**2 + 2 * math.log(ranks))
