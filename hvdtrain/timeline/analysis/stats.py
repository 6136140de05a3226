"""Means with their confidence intervals, where neighbouring values resemble each other. Pure."""

from __future__ import annotations

import math

import numpy as np

from hvdtrain.timeline.analysis.analysis import Estimate
from hvdtrain.timeline.columns import Floats

BATCHES = 20
"""Batches that a series is cut into at most; 10 to 30 are what Schmeiser recommends (Operations Research 30, 1982)."""

_Z_975 = 1.959964
_DOUBT = 1.5


def student(degrees: float, *, z: float = _Z_975) -> float:
    """The quantile of Student's t at which the normal one is `z`.

    Cornish-Fisher expansion, Abramowitz and Stegun 26.7.5: within 2% from 3 degrees on; below, what 1 and 2 have.
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
    """The mean of a series and its 95% confidence interval, by batch means.

    Steps that follow each other are alike (a clock that changes, a neighbour on the host), so that their number says
    more than they know: means of batches of consecutive ones are nearly independent (Schmeiser, "Batch size effects in
    the analysis of simulation output", Operations Research 30, 1982). Of a single value nothing can be said: the
    interval is empty. Where no value is negative, neither is the mean.

    Args:
        values: in their order [n], one at least.
        weights: of each, positive; batches are then of about equal weight [n].
    """
    weights = np.ones(len(values)) if weights is None else weights
    mean = float(np.average(values, weights=weights))
    half = half_width(values - mean, weights)
    if not half:
        return Estimate(mean, mean, mean)
    low = max(0.0, mean - half) if np.min(values) >= 0 else mean - half
    return Estimate(mean, low, mean + half)


def ratio_of(parts: Floats, wholes: Floats) -> Estimate:
    """The sum of `parts` over the sum of `wholes`, one of each a step, and its 95% confidence interval, 0 to 1.

    By the residuals of the parts from their share of the wholes (Cochran, Sampling techniques, 1977, 6.3), in batches.
    Of a single step the interval is empty.
    """
    share = float(np.sum(parts) / np.sum(wholes))
    half = half_width(parts - share * wholes, np.ones(len(parts))) / float(np.mean(wholes))
    return Estimate(share, max(0.0, share - half), share + half)


def half_width(deviations: Floats, weights: Floats) -> float:
    """Half of the 95% confidence interval of the mean of a series, by batch means; 0 of a single value.

    Args:
        deviations: of the values from their mean [n].
        weights: of each [n].
    """
    count = len(deviations)
    batches = min(BATCHES, max(2, count // 3)) if count > 1 else 1
    reach = np.cumsum(weights) - weights / 2
    of_batch = np.unique((reach * batches / weights.sum()).astype(int), return_inverse=True)[1]
    mass = np.bincount(of_batch, weights=weights)
    batches = len(mass)
    if batches == 1:
        return 0.0
    means = np.bincount(of_batch, weights=deviations * weights) / mass
    # of batches of unequal weight, which whole values cannot always avoid, their number is a little less
    spread = math.sqrt(float(np.sum(mass**2 * means**2)) / (1 - 1 / batches)) / float(mass.sum())
    return student(batches - 1) * spread


def correlation_steps(deviations: Floats) -> float:
    """How many consecutive values say as much as one independent one, at least 1.

    That is (1 + r) / (1 - r) of a process whose next value resembles the last one by r, which is estimated over all
    rows, corrected for its bias in short series (Marriott and Pope, Biometrika 41, 1954) and taken to be larger by one
    and a half standard errors; or, where that is more, what means of longer and longer batches show, which a slow
    drift under quick noise needs.

    Args:
        deviations: rows of equal length, each about its own mean [rows, n].
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
        # of 10 batches of a few rows the variance is known to a factor; only what goes beyond that counts
        doubt = 1 + 2 * math.sqrt(2 / max(1, batches.size - len(deviations)))
        found = max(found, length * float(batches.var(axis=1).mean()) / power / doubt)
    return float(min(found, count))
