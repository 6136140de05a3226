"""Means with confidence intervals for autocorrelated series. Pure."""

from __future__ import annotations

import math

import numpy as np

from hvdtrain.timeline.analysis.analysis import Estimate
from hvdtrain.timeline.columns import Floats

BATCHES = 20
"""Largest number of batches; Schmeiser recommends 10 to 30 (Operations Research 30, 1982)."""

_Z_975 = 1.959964
_DOUBT = 1.5


def student(degrees: float, *, z: float = _Z_975) -> float:
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
