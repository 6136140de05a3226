"""Means and their intervals, where neighbours resemble each other."""

from __future__ import annotations

import numpy as np
import pytest

from hvdtrain.timeline.analysis.stats import correlation_steps, mean_of, student


def _series(generator: np.random.Generator, count: int, r: float) -> np.ndarray:  # type: ignore[type-arg]
    found = generator.normal(0, 1, count)
    for i in range(1, count):
        found[i] = r * found[i - 1] + np.sqrt(1 - r * r) * found[i]
    return found


@pytest.mark.parametrize("r", [0.0, 0.5])
@pytest.mark.parametrize("count", [12, 60, 400])
def test_intervals_hold_the_mean_about_as_often_as_they_say(count: int, r: float) -> None:
    generator = np.random.default_rng(count)
    found = [mean_of(_series(generator, count, r)) for _ in range(500)]
    held = np.mean([each.low <= 0 <= each.high for each in found])
    assert (0.92 if r == 0 else 0.7 if count < 60 else 0.85) <= held <= 0.98


def test_one_value_has_no_interval_and_what_is_never_negative_has_none_below_0() -> None:
    alone = mean_of(np.array([3.0]))
    assert (alone.value, alone.low, alone.high) == (3.0, 3.0, 3.0)
    assert mean_of(np.array([0.0, 0.0, 0.0, 90.0])).low == 0.0


@pytest.mark.parametrize(("degrees", "quantile"), [(1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (19, 2.093)])
def test_students_quantiles_are_those_of_the_tables(degrees: int, quantile: float) -> None:
    assert student(degrees) == pytest.approx(quantile, rel=0.02)


@pytest.mark.parametrize("r", [0.0, 0.5, 0.9])
def test_how_alike_steps_are_is_found_and_rather_too_much_than_too_little(r: float) -> None:
    generator = np.random.default_rng(1)
    rows = np.array([_series(generator, 500, r) for _ in range(4)])
    found = correlation_steps(rows - rows.mean(axis=1, keepdims=True))
    assert 0.95 <= found / ((1 + r) / (1 - r)) <= 1.6
