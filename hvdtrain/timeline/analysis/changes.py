"""Change points: where the level of a series changes for good. Pure and deterministic.

Binary segmentation (Scott and Knott, Biometrics 30, 1974) of medians of blocks, by the largest CUSUM. The noise is that
of neighbouring blocks, so that changes do not add to it. ruptures, a library, is not used: it wants the number of
changes or a penalty, which depends on that noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from hvdtrain.timeline.columns import Floats

LEAST_STEPS = 8
"""Steps on each side of a change."""
_BLOCKS = 64
_LEAST_BLOCK = 4
_LEAST_BLOCKS, _ENOUGH_BLOCKS = 2, 8
"""Blocks on each side of a change, and in all: fewer say little about the noise."""
_NEAR = 2
"""Blocks: the change may be so far from the best edge of blocks."""
_MOST = 8
_ODDS = 0.001
"""Probability of a change that is chance, in a series of independent blocks."""


def change_points(values: Floats, least: float) -> list[int]:
    """Return the columns at which a new level of some row begins, ascending; `_MOST` at most.

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
    limit = math.sqrt(2 * math.log(2 * blocks * rows / _ODDS))
    row_of: dict[int, int] = {}
    rises: dict[int, bool] = {}

    def near(at: int) -> bool:
        before = [at - back for back in range(1, _LEAST_BLOCKS + 1)]
        return any(row_of.get(each) == row_of[at] and rises[each] == rises[at] for each in before)

    todo = [(0, blocks)]
    while todo and len(row_of) < _MOST:
        begin, end = todo.pop(0)
        change = _largest(np.maximum(medians[:, begin:end], 0.0), noise, least, limit)
        if change is not None:
            middle = begin + change[1]
            row_of[middle], rises[middle] = change[0], change[2]
            todo += [(begin, middle), (middle, end)]
    means = np.add.reduceat(values, edges[:-1], axis=1) / np.diff(edges)
    # A change within a block is found at both of its edges.
    places = _significant(means, {at: row for at, row in row_of.items() if not near(at)}, limit)
    kept = [0]
    for before, at, after in zip([0, *places], places, [*places[1:], blocks], strict=False):
        low, high = max(at - _NEAR, before + 1), min(at + _NEAR, after - 1)
        found = _refined(values[row_of[at]], edges[before], edges[low], edges[high], edges[after])
        if min(found - kept[-1], count - found) >= LEAST_STEPS:
            kept.append(found)
    return kept[1:]


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


def _largest(medians: Floats, noise: Floats, least: float, limit: float) -> tuple[int, int, bool] | None:
    """Return row and block of the most significant change, and whether it is a rise; None if none is significant."""
    count = medians.shape[1]
    if count < 2 * _LEAST_BLOCKS:
        return None
    left = np.arange(1, count)
    sums = np.cumsum(medians, axis=1)
    before = sums[:, :-1] / left
    rise = (sums[:, -1:] - sums[:, :-1]) / (count - left) - before
    jump = np.abs(rise)
    score = np.sqrt(left * (count - left) / count) * jump / noise[:, None]
    score[:, : _LEAST_BLOCKS - 1] = score[:, count - _LEAST_BLOCKS :] = 0.0
    score[jump < least] = 0.0
    row, place = np.unravel_index(int(np.argmax(score)), score.shape)
    return (int(row), int(place) + 1, bool(rise[row, place] > 0)) if score[row, place] > limit else None


def _refined(values: Floats, begin: int, low: int, high: int, end: int) -> int:
    """Return the step in [low, high] that divides [begin, end) best into two levels, by absolute deviations."""
    before, after = np.median(values[begin:low]), np.median(values[high:end])
    worse = np.abs(values[low:high] - before) - np.abs(values[low:high] - after)
    return int(low + np.argmin(np.append(0.0, np.cumsum(worse))))
