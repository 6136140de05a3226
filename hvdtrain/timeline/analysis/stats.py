"""Autocorrelated series: means with confidence intervals, and change points, where a level changes. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from hvdtrain.timeline.analysis.analysis import Estimate
from hvdtrain.timeline.columns import Floats

BATCHES = 20
"""Largest number of batches; Schmeiser recommends 10 to 30 (Operations Research 30, 1982)."""

Z_975 = 1.959964
_DOUBT = 1.5


def student(degrees: float, *, z: float = Z_975) -> float:
    """Return the quantile of Student's t with the probability of the normal quantile `z`.

    Cornish-Fisher expansion, Abramowitz and Stegun 26.7.5: within 2% from 3 degrees on; exact for 1 and 2.
    """
    if degrees < 3:
        probability = 0.5 * (1 + math.erf(z / math.sqrt(2)))
        one = math.tan(math.pi * (probability - 0.5))
        x = 2 * probability - 1
        two = x * math.sqrt(2 / max(1e-12, 1 - x * x))
        return one if degrees < 2 else two
    g1 = (z**3 + z) / 4
    g2 = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    g3 = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + g1 / degrees + g2 / degrees**2 + g3 / degrees**3


def mean_of(values: Floats, weights: Floats | None = None) -> Estimate:
    """Return the mean of a series and its 95% confidence interval, by batch means.

    Consecutive steps are correlated (clock changes, other load on the host). Means of batches of consecutive steps are
    nearly independent (Schmeiser, "Batch size effects in the analysis of simulation output", Operations Research 30,
    1982). The interval of a single value is empty. If no value is negative, neither is the low end. With weights [n],
    all positive, batches have about equal weight.
    """
    weights = np.ones(len(values)) if weights is None else weights
    mean = float(np.average(values, weights=weights))
    half = half_width(values - mean, weights)
    if not half:
        return Estimate(mean, mean, mean)
    low = max(0.0, mean - half) if np.min(values) >= 0 else mean - half
    return Estimate(mean, low, mean + half)


def ratio_of(parts: Floats, wholes: Floats) -> Estimate:
    """Return the sum of `parts` over the sum of `wholes`, one of each per step, with its 95% confidence interval.

    Computed from the residuals of the parts (Cochran, Sampling techniques, 1977, 6.3), in batches. The interval of a
    single step is empty.
    """
    share = float(np.sum(parts) / np.sum(wholes))
    half = half_width(parts - share * wholes, np.ones(len(parts))) / float(np.mean(wholes))
    return Estimate(share, max(0.0, share - half), share + half)


def half_width(deviations: Floats, weights: Floats) -> float:
    """Return half of the 95% confidence interval of a series' mean, by batch means; 0 for a single value."""
    count = len(deviations)
    batches = min(BATCHES, max(2, count // 3)) if count > 1 else 1
    reach = np.cumsum(weights) - weights / 2
    of_batch = np.unique((reach * batches / weights.sum()).astype(int), return_inverse=True)[1]
    mass = np.bincount(of_batch, weights=weights)
    batches = len(mass)
    if batches == 1:
        return 0.0
    means = np.bincount(of_batch, weights=deviations * weights) / mass
    # batches of unequal weight, which whole values cannot always avoid, count a little less
    spread = math.sqrt(float(np.sum(mass**2 * means**2)) / (1 - 1 / batches)) / float(mass.sum())
    return student(batches - 1) * spread


def correlation_steps(deviations: Floats) -> float:
    """Return how many consecutive values are worth one independent value, at least 1.

    For a first-order autoregressive process it is (1 + r) / (1 - r). r is estimated over all rows, corrected for its
    bias in short series (Marriott and Pope, Biometrika 41, 1954) and increased by 1.5 standard errors. Means of longer
    batches may give more, which detects a slow drift under fast noise; then that counts. Deviations are from each row's
    own mean [rows, n].
    """
    count = deviations.shape[1]
    power = float(np.mean(deviations**2))
    if count < 4 or power <= 0:
        return 1.0
    r = float(np.mean(deviations[:, 1:] * deviations[:, :-1])) / power
    error = math.sqrt(max(0.0, 1 - r * r) / (count * max(1, len(deviations) - 1)))
    r = min(0.98, max(0.0, r + (1 + 4 * r) / count + _DOUBT * error))
    found = (1 + r) / (1 - r)
    for length in (count // 40, count // 20, count // 10):
        if length < 2:
            continue
        batches = deviations[:, : count // length * length].reshape(len(deviations), -1, length).mean(axis=2)
        # the variance of 10 batches of a few rows is only known to a factor; only a larger excess counts
        doubt = 1 + 2 * math.sqrt(2 / max(1, batches.size - len(deviations)))
        found = max(found, length * float(batches.var(axis=1).mean()) / power / doubt)
    return float(min(found, count))


LEAST_STEPS = 8
"""Steps on each side of a change."""
_BLOCKS = 128
_LEAST_BLOCK = 4
_LEAST_BLOCKS, _ENOUGH_BLOCKS = 2, 8
"""Blocks on each side of a change, and in all: fewer say little about the noise."""
_NEAR = 2
"""Blocks: the change may be so far from the best edge of blocks."""
_MOST = 16
_ODDS = 0.001
"""Probability of a change that is chance, in a series of independent blocks."""


def change_points(values: Floats, least: float) -> list[int]:
    """Return the columns at which a new level of some row begins, ascending; about `_MOST` at most.

    Circular binary segmentation (Olshen et al., Biostatistics 5, 2004) of medians of blocks: the interval that differs
    most from the rest is cut out, then the same within each part. An interval has two ends, so that a short one in the
    middle is as visible as one at an end. The noise is that of neighbouring blocks, so that changes do not add to it.
    ruptures, a library, is not used: it wants the number of changes or a penalty, which depends on that noise.

    Args:
        values: series of equal length [rows, n].
        least: a smaller change of a level does not count, nor does one between levels below 0; in units of `values`.
    """
    rows, count = values.shape
    blocks = min(_BLOCKS, count // _LEAST_BLOCK)
    if blocks < _ENOUGH_BLOCKS:
        return []
    edges = np.linspace(0, count, blocks + 1).astype(int)
    medians = np.array([np.median(values[:, a:b], axis=1) for a, b in pairwise(edges)]).T
    noise = 1.4826 / math.sqrt(2) * np.median(np.abs(np.diff(medians, axis=1)), axis=1)
    noise = np.maximum(noise, least / _BLOCKS)
    limit = math.sqrt(2 * math.log(rows * blocks**2 / _ODDS))
    cuts: dict[int, tuple[int, bool]] = {}  # row, and whether it rises there, by block
    todo = [(0, blocks)]
    while todo and len(cuts) < _MOST:
        begin, end = todo.pop(0)
        found = _most_different(np.maximum(medians[:, begin:end], 0.0), noise, least, limit)
        if found is not None:
            row, first, last, is_higher = found
            ends = {begin + first: (row, is_higher), begin + last: (row, not is_higher)}
            inner = {at: cut for at, cut in ends.items() if begin < at < end}
            cuts |= inner
            todo += pairwise([begin, *inner, end])
    # A change within a block is found at both of its edges.
    near = {at for at, cut in cuts.items() if cut in [cuts.get(at - back) for back in range(1, _LEAST_BLOCKS + 1)]}
    means = np.add.reduceat(values, edges[:-1], axis=1) / np.diff(edges)
    places = _significant(means, {at: row for at, (row, _) in cuts.items() if at not in near}, limit)
    kept: dict[int, bool] = {}  # whether the level rises, by column
    for before, at, after in zip([0, *places], places, [*places[1:], blocks], strict=False):
        (row, rises), low, high = cuts[at], max(at - _NEAR, before + 1), min(at + _NEAR, after - 1)
        column = _refined(values[row], edges[before], edges[low], edges[high], edges[after])
        last = max(kept, default=0)
        if min(column - last, count - column) >= LEAST_STEPS:
            kept[column] = rises
        elif kept and column - last < LEAST_STEPS and rises != kept[last]:  # a stretch that is too short
            del kept[last]
    return [*kept]


def _significant(means: Floats, row_of: Mapping[int, int], limit: float) -> list[int]:
    """Return the changes [blocks] that the means of blocks show, too, given how these vary between changes.

    Where a rank is late in four of five steps, medians jump by chance, but means vary as much all the time.
    """
    places = sorted(row_of)
    while places:
        parts = np.split(means, places, axis=1)
        within = [((part - part.mean(axis=1, keepdims=True)) ** 2).sum(axis=1) for part in parts]
        spread = np.sqrt(sum(within) / (means.shape[1] - len(parts)))
        scores = []
        for at, left, right in zip(places, parts, parts[1:], strict=False):
            row, (n, m) = row_of[at], (left.shape[1], right.shape[1])
            jump = abs(float(right[row].mean() - left[row].mean()))
            scores.append(jump * math.sqrt(n * m / (n + m)) / max(float(spread[row]), 1e-12))
        weakest = int(np.argmin(scores))
        if scores[weakest] > limit:
            break
        del places[weakest]
    return places


def _most_different(medians: Floats, noise: Floats, least: float, limit: float) -> tuple[int, int, int, bool] | None:
    """Return the interval that differs most from the rest: row, first block, end, whether it is higher; None if none.

    It, and what is left on each side, has `_LEAST_BLOCKS` or more, or nothing is left there.
    """
    count, best, found = medians.shape[1], limit, None
    sums = np.concatenate([np.zeros((len(medians), 1)), np.cumsum(medians, axis=1)], axis=1)
    for length in range(_LEAST_BLOCKS, count - _LEAST_BLOCKS + 1):
        inside = sums[:, length:] - sums[:, :-length]
        more = inside / length - (sums[:, -1:] - inside) / (count - length)
        score = np.where(np.abs(more) >= least, np.abs(more) / noise[:, None], 0.0)
        score[:, 1:_LEAST_BLOCKS] = score[:, count - length - _LEAST_BLOCKS + 1 : count - length] = 0.0
        row, first = np.unravel_index(int(np.argmax(score)), score.shape)
        if (value := score[row, first] * math.sqrt(length * (count - length) / count)) > best:
            best, found = value, (int(row), int(first), int(first) + length, bool(more[row, first] > 0))
    return found


def _refined(values: Floats, begin: int, low: int, high: int, end: int) -> int:
    """Return the step in [low, high] that divides [begin, end) best into two levels, by absolute deviations."""
    before, after = np.median(values[begin:low]), np.median(values[high:end])
    worse = np.abs(values[low:high] - before) - np.abs(values[low:high] - after)
    return int(low + np.argmin(np.append(0.0, np.cumsum(worse))))
