"""The lateness of ranks, its cost per step and its significance. Pure and deterministic."""

from __future__ import annotations

import math
from collections.abc import Collection
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hvdtrain.timeline.analysis.analysis import Estimate
from hvdtrain.timeline.analysis.stats import BATCHES, correlation_steps, student
from hvdtrain.timeline.columns import Floats

Order = NDArray[np.int64]

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


def median_of_others(values: Floats) -> Floats:
    """Return for each row and column the median of the other rows [rows, n]; a single row itself."""
    rows = len(values)
    if rows == 1:
        return np.array(values)
    middle = sorted({(rows - 2) // 2, (rows - 1) // 2})
    ordered = np.partition(values, [*middle, middle[-1] + 1], axis=0)
    picked = [np.where(values <= ordered[i], ordered[i + 1], ordered[i]) for i in middle]
    return np.asarray(sum(picked) / len(picked))


def order_of(work: Floats) -> Order:
    """Return the steps of each rank from the shortest to the longest [ranks, steps]."""
    return np.argsort(work, axis=1, kind="stable")


def like_the_others(work: Floats, late: Collection[int] = (), order: Order | None = None) -> Floats:
    """Return each rank's times as if they had the distribution of a typical other rank.

    A rank's longest step becomes the longest step of a typical other rank (median over the other ranks), its second
    longest the second longest, and so on. Steps that are long for all ranks stay long. Steady and rare lateness are
    treated alike. No step becomes longer, even if other ranks are noisier. `work` is [ranks, steps]; ranks that are
    `late` are not typical. `order` is `order_of(work)`, if it is known.
    """
    order = order_of(work) if order is None else order
    ordered = np.take_along_axis(work, order, axis=1)
    rest = [rank for rank in range(len(work)) if rank not in late]
    typical = np.empty_like(ordered)
    typical[rest] = median_of_others(ordered[rest])
    if len(late):
        typical[list(late)] = np.median(ordered[rest], axis=0)
    result = np.empty_like(work)
    np.put_along_axis(result, order, np.minimum(typical, ordered), axis=1)
    return result


def tamed(work: Floats) -> Floats:
    """Clip outliers of single steps at three times the usual scatter [ranks, steps].

    The scatter is between ranks, each relative to its own median. A delay of all ranks in a step stays: it is the lower
    median over ranks, because other load can only delay a rank. This makes a small steady lateness visible.
    """
    about_own = work - np.median(work, axis=1, keepdims=True)
    of_step = np.sort(about_own, axis=0)[(len(work) - 1) // 2]
    alone = about_own - of_step
    scatter = 1.4826 * np.median(np.abs(about_own - median_of_others(about_own)))
    return np.asarray(work - alone + np.clip(alone, -3 * scatter, 3 * scatter))


def costs(work: Floats, late: Collection[int], weights: Floats, order: Order, fewer: Floats | float = 0.0) -> Floats:
    """Return how much shorter steps would be if each rank were like the others [ranks], in the units of `work`, >= 0.

    The mean over steps, by `weights` [steps]. Ranks are ready earlier than compared, by `fewer` [ranks, 1].

    A step takes as long as its last rank. Ranks that are `late` together share the total gain: each delay is divided
    among the ranks that have it (the Shapley value; Littlechild and Owen, Management Science 20, 1973). Any other rank
    is considered alone: only steps in which it is the last become shorter. `order` is `order_of(work)`.
    """
    changed, work = like_the_others(work, late, order) - fewer, work - fewer
    second, longest = np.partition(work, -2, axis=0)[-2:]
    last = np.argmax(work, axis=0)
    gain = longest - np.maximum(second, changed[last, np.arange(len(last))])
    found: Floats = np.asarray(np.bincount(last, weights * gain, len(work)) / weights.sum())
    if len(late):
        found[list(late)] = np.average(_shared(work, changed, list(late)), axis=1, weights=weights)
    return found


def _shared(work: Floats, changed: Floats, late: list[int]) -> Floats:
    mended = work.copy()
    mended[late] = changed[late]
    base = mended.max(axis=0)
    delay = np.maximum(0.0, work[late] - base)
    order = np.argsort(delay, axis=0)
    ordered = np.take_along_axis(delay, order, axis=0)
    rises = np.diff(ordered, axis=0, prepend=0.0) / np.arange(len(late), 0, -1)[:, None]
    share = np.empty_like(delay)
    np.put_along_axis(share, order, np.cumsum(rises, axis=0), axis=0)
    return np.asarray(share)


def cost_estimates(
    work: Floats, late: Collection[int], correlation: float, weights: Floats, fewer: Floats
) -> list[Estimate]:
    """`costs` with their 95% confidence intervals: the jackknife over blocks of consecutive steps.

    The estimator is repeated without each block in turn (Künsch, "The jackknife and the bootstrap for general
    stationary observations", Annals of Statistics 17, 1989), so the uncertainty of the other ranks' times counts too.
    Blocks are longer than the correlation of steps if there are enough steps, and have about equal weight.
    """
    steps = work.shape[1]
    blocks = int(min(BATCHES, max(4, steps / (2 * correlation)), steps))
    order = order_of(work)
    whole = costs(work, late, weights, order, fewer)
    reach = np.cumsum(weights)
    edges = np.unique([0, *np.searchsorted(reach, reach[-1] * np.arange(1, blocks) / blocks), steps])
    blocks = len(edges) - 1
    if blocks < 2:
        return [Estimate(float(value), -math.inf, math.inf) for value in whole]

    def costs_without(begin: int, end: int) -> Floats:
        """Return `costs` without the steps from `begin` to `end`, which keeps the order of the others."""
        kept = np.concatenate([np.arange(begin), np.arange(end, steps)])
        rest = order[(order < begin) | (order >= end)].reshape(len(work), -1)
        return costs(work[:, kept], late, weights[kept], np.where(rest >= end, rest - (end - begin), rest), fewer)

    without = np.array([costs_without(begin, end) for begin, end in pairwise(edges)])
    error = np.sqrt((blocks - 1) / blocks * ((without - without.mean(axis=0)) ** 2).sum(axis=0))
    half = student(blocks - 1) * error
    return [Estimate(float(v), float(v - h), float(v + h)) for v, h in zip(whole, half, strict=True)]


def latest(work: Floats) -> tuple[list[int], float]:
    """Return the ranks that are significantly later than the others, the latest first, and how alike steps are.

    There are two statistics of lateness, both relative to the median of the other ranks in the step. The mean detects a
    rank that is late rarely and by much. The mean without outliers (`tamed`) detects a small steady lateness.
    Each is compared with the latest rank after shuffling the ranks in each block of steps. That accounts for having
    searched many ranks: a permutation test of the largest statistic (Westfall and Young, Resampling-based multiple
    testing, 1993).

    Late ranks take part in the shuffling. That hides others but makes none late, so a repetition without them may find
    more. At most half of the ranks are returned: if one rank is faster, all others are later than their median. With
    too few blocks to shuffle, a rank's mean is tested against its own scatter and the other ranks' means, with the
    probability divided by the number of ranks.

    `work` is [ranks, steps], of at least two ranks. How alike steps are is how many are worth one independent step.
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
    parts = [part.mean(axis=1) for part in np.array_split(both, blocks, axis=1)]
    mean = np.mean(parts, axis=0)
    means = np.stack([mean.real, mean.imag])
    ranks = np.arange(len(steady), dtype=np.min_scalar_type(len(steady)))  # small numbers are shuffled faster
    generator = np.random.default_rng(0)
    highest = np.empty((2, 0))
    for _ in range(_SHUFFLES // _TOGETHER):
        orders = generator.permuted(np.broadcast_to(ranks, (_TOGETHER, blocks, len(ranks))), axis=2)
        shuffled = sum(part[orders[:, number]] for number, part in enumerate(parts)) / blocks
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
    for rank in (rank for rank in np.argsort(-means).tolist() if means[rank] > 0):
        if not (_exceeds_own_scatter(values[rank], alike, len(means)) or _exceeds_others(means, rank)):
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
