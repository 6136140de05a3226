"""Curves over samples or seconds: means over a window, and the difference of two curves with its interval. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hvdtrain.timeline.analysis.analysis import Estimate
from hvdtrain.timeline.analysis.stats import half_width, student
from hvdtrain.timeline.columns import Floats

SAMPLES, SECONDS = "samples", "seconds"
"""Axes of curves."""


@dataclass(frozen=True, eq=False)
class Curve:
    """A loss that is constant within each step [n]. Steps do not overlap; nan where it is not finite.

    Positions are in samples, so micro-batch, number of ranks and length of a step do not change where a loss is.
    """

    begins: Floats
    ends: Floats
    values: Floats

    @property
    def usual_length(self) -> float:
        """The median length of a recorded step."""
        lengths = self.ends - self.begins
        return float(np.median(lengths[lengths > 0])) if (lengths > 0).any() else 0.0

    @property
    def first(self) -> float:
        """Where the first recorded step begins: not at 0 if the run began from the state of another run."""
        return float(self.begins[np.argmax(self.ends > self.begins)])

    def mean(self, low: float, high: float) -> float | None:
        """Return the mean from `low` to `high`, by length; None if the curve has nothing there."""
        weights = np.minimum(self.ends, high) - np.maximum(self.begins, low)
        inside = weights > 0
        return float(np.average(self.values[inside], weights=weights[inside])) if inside.any() else None

    def at(self, places: Floats) -> tuple[Floats, NDArray[np.bool_]]:
        """Return the values at places, and whether the curve has them."""
        steps = np.minimum(np.searchsorted(self.ends, places), len(self.ends) - 1)
        return self.values[steps], (places > self.begins[steps]) & (places <= self.ends[-1])


@dataclass(frozen=True, eq=False)
class Points:
    """Evaluations at ascending places [n]."""

    places: Floats
    values: Floats

    def at(self, place: float) -> float | None:
        """Return the value at a place, linear between two evaluations; None outside them."""
        if not self.places[0] <= place <= self.places[-1]:
            return None
        return float(np.interp(place, self.places, self.values))


def difference_by_noise(a: Curve, b: Curve, low: float, high: float) -> Estimate | None:
    """Return the mean of b - a from `low` to `high` with its 95% interval; None if they have nothing in common there.

    Both curves are compared place by place, so that a trend, and samples that both saw there, cancel out. The interval
    is by batch means (`half_width`): it knows the noise from step to step, not that from seed to seed.
    """
    edges = np.unique(np.concatenate([[low, high], a.begins, a.ends, b.begins, b.ends]))
    edges = edges[(edges >= low) & (edges <= high)]
    middles, weights = (edges[1:] + edges[:-1]) / 2, np.diff(edges)
    (values_a, in_a), (values_b, in_b) = a.at(middles), b.at(middles)
    inside = in_a & in_b & (weights > 0)
    differences, weights = (values_b - values_a)[inside], weights[inside]
    if not len(differences):
        return None
    mean = float(np.average(differences, weights=weights))
    if len(differences) == 1 or not math.isfinite(mean):
        return unknown(mean)
    half = half_width(differences - mean, weights)
    return Estimate(mean, mean - half, mean + half)


def difference_by_seeds(a: Sequence[float], b: Sequence[float]) -> Estimate:
    """Return the difference of means b - a with its 95% interval, from runs that differ in their seeds.

    Welch's interval (Biometrika 34, 1947) with Satterthwaite's degrees of freedom. If one side has a single run, it is
    Student's, which assumes that both sides vary equally.
    """
    mean = float(np.mean(b) - np.mean(a))
    spread = [float(np.var(each, ddof=1)) / len(each) if len(each) > 1 else math.nan for each in (a, b)]
    if len(a) > 1 and len(b) > 1:
        total = sum(spread)
        parts = [part**2 / (len(each) - 1) for part, each in zip(spread, (a, b), strict=True)]
        degrees = total**2 / sum(parts) if total > 0 else 1.0
    else:
        known = a if len(a) > 1 else b
        total = float(np.var(known, ddof=1)) * (1 / len(a) + 1 / len(b))
        degrees = len(known) - 1
    half = student(degrees) * math.sqrt(total)
    return Estimate(mean, mean - half, mean + half)


def unknown(value: float) -> Estimate:
    """Return an estimate without an interval."""
    return Estimate(value, -math.inf, math.inf)
