"""The lateness of ranks and its cost per step. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection
from itertools import pairwise

import numpy as np

from hvdtrain.timeline.analysis.analysis import Estimate
from hvdtrain.timeline.analysis.stats import BATCHES, student
from hvdtrain.timeline.columns import Floats


def median_of_others(values: Floats) -> Floats:
    """Return for each row and column the median of the other rows [rows, n]; a single row itself."""
    rows = len(values)
    if rows == 1:
        return np.array(values)
    ordered = np.sort(values, axis=0)
    place = np.argsort(np.argsort(values, axis=0, kind="stable"), axis=0, kind="stable")
    low, high = (rows - 2) // 2, (rows - 1) // 2
    picked = [np.where(place <= i, ordered[i + 1], ordered[i]) for i in {low, high}]
    return np.asarray(sum(picked) / len(picked))


def like_the_others(work: Floats, late: Collection[int] = ()) -> Floats:
    """Return each rank's times as if they had the distribution of a typical other rank.

    A rank's longest step becomes the longest step of a typical other rank (median over the other ranks), its second
    longest the second longest, and so on. Steps that are long for all ranks stay long. Steady and rare lateness are
    treated alike. No step becomes longer, even if other ranks are noisier.

    Args:
        work: of each rank in each step [ranks, steps].
        late: ranks that are not typical.
    """
    order = np.argsort(work, axis=1, kind="stable")
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


def costs(work: Floats, late: Collection[int] = ()) -> Floats:
    """Return how much shorter steps would be if each rank were like the others [ranks], in the units of `work`, >= 0.

    A step takes as long as its last rank. Ranks that are `late` together share the total gain: each delay is divided
    among the ranks that have it (the Shapley value; Littlechild and Owen, Management Science 20, 1973). Any other rank
    is considered alone.
    """
    changed = like_the_others(work, late)
    ordered = np.sort(work, axis=0)
    longest, second = ordered[-1], ordered[-2]
    last = np.argmax(work, axis=0)
    found = np.zeros(len(work))
    for rank in range(len(work)):
        if rank not in late:
            others = np.where(last == rank, second, longest)
            found[rank] = float(np.mean(longest - np.maximum(others, changed[rank])))
    if len(late):
        found[list(late)] = _shared(work, changed, list(late))
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
    return np.asarray(share.mean(axis=1))


def cost_estimates(work: Floats, late: Collection[int], correlation: float) -> list[Estimate]:
    """`costs` with their 95% confidence intervals: the jackknife over blocks of consecutive steps.

    The estimator is repeated without each block in turn (Künsch, "The jackknife and the bootstrap for general
    stationary observations", Annals of Statistics 17, 1989), so the uncertainty of the other ranks' times counts too.
    Blocks are longer than the correlation of steps if there are enough steps.
    """
    steps = work.shape[1]
    blocks = int(min(BATCHES, max(4, steps / (2 * correlation)), steps))
    whole = costs(work, late)
    if blocks < 2:
        return [Estimate(float(value), -math.inf, math.inf) for value in whole]
    edges = np.linspace(0, steps, blocks + 1).astype(int)
    without = np.array([costs(np.delete(work, np.s_[a:b], axis=1), late) for a, b in pairwise(edges)])
    error = np.sqrt((blocks - 1) / blocks * ((without - without.mean(axis=0)) ** 2).sum(axis=0))
    half = student(blocks - 1) * error
    return [Estimate(float(v), float(v - h), float(v + h)) for v, h in zip(whole, half, strict=True)]
