"""Series whose neighbours resemble each other: where the level changes, means and their intervals."""

from __future__ import annotations

import numpy as np
import pytest

from hvdtrain.timeline.analysis.stats import LEAST_STEPS, change_points, correlation_steps, mean_of, student
from hvdtrain.timeline.columns import Floats
from tests.support.step_tables import noise


def _series(seed: int, rows: int, count: int, kind: str = "gaussian") -> Floats:
    return noise(np.random.default_rng(seed), (rows, count), kind, 1.0)


@pytest.mark.parametrize("kind", ["gaussian", "heavy", "lasting"])
@pytest.mark.parametrize(("rows", "count"), [(1, 60), (2, 400), (64, 480)])
def test_a_change_is_found_where_it_is(rows: int, count: int, kind: str) -> None:
    for seed in range(5):
        values = _series(seed, rows, count, kind)
        values[rows // 2, count // 3 :] += 12.0
        found = change_points(values, 1.0)
        assert min(abs(at - count // 3) for at in found) <= 0.05 * count, (seed, found)


@pytest.mark.parametrize(("begin", "end"), [(386, None), (394, None), (200, 216)])
def test_a_change_within_a_block_is_one_and_a_short_spell_is_two(begin: int, end: int | None) -> None:
    for seed in (0, 1, 4):
        values = _series(seed, 8, 500)
        values[3, begin:end] += 40.0
        assert change_points(values, 1.0) == [at for at in (begin, end) if at is not None], seed


def test_several_rows_may_change_and_change_back() -> None:
    values = _series(1, 4, 600)
    for row, steps in ((0, np.s_[:150]), (2, np.s_[150:300]), (3, np.s_[450:])):
        values[row, steps] += 9.0
    assert change_points(values, 1.0) == pytest.approx([150, 300, 450], abs=3)


@pytest.mark.parametrize("kind", ["gaussian", "heavy"])
@pytest.mark.parametrize(("rows", "count"), [(1, 40), (2, 60), (8, 400), (64, 480)])
def test_noise_has_no_changes(rows: int, count: int, kind: str) -> None:
    with_changes = sum(bool(change_points(_series(seed, rows, count, kind), 0.1)) for seed in range(100))
    assert with_changes <= 1


def test_a_row_that_is_high_in_most_steps_by_chance_does_not_change() -> None:
    for seed in range(30):
        values = _series(seed, 4, 400)
        values[1, np.random.default_rng(seed + 9).random(400) < 0.8] += 21.0
        assert change_points(values, 1.0) == []


def test_small_changes_and_changes_below_zero_do_not_count() -> None:
    values = _series(3, 2, 400) * 0.01
    values[0, 200:] += 0.9
    assert change_points(values, 1.0) == []
    values[0, 200:] += 0.9
    assert change_points(values, 1.0) == [200]
    assert change_points(values - 5.0, 1.0) == []


def test_few_steps_have_no_changes_and_parts_are_not_short() -> None:
    values = np.append(np.zeros(15), np.full(15, 99.0))[None]
    assert change_points(values, 1.0) == []
    long = np.concatenate([np.zeros(6), np.full(60, 99.0), np.zeros(6)])[None]
    edges = [0, *change_points(long, 1.0), 72]
    assert min(np.diff(edges)) >= LEAST_STEPS


@pytest.mark.parametrize("kind", ["gaussian", "lasting"])
@pytest.mark.parametrize("count", [12, 60, 400])
def test_intervals_hold_the_mean_about_as_often_as_they_say(count: int, kind: str) -> None:
    generator = np.random.default_rng(count)
    found = [mean_of(noise(generator, (1, count), kind, 1.0)[0]) for _ in range(500)]
    held = np.mean([each.low <= 0 <= each.high for each in found])
    assert (0.92 if kind == "gaussian" else 0.7 if count < 60 else 0.85) <= held <= 0.98


def test_one_value_has_no_interval_and_what_is_never_negative_has_none_below_0() -> None:
    alone = mean_of(np.array([3.0]))
    assert (alone.value, alone.low, alone.high) == (3.0, 3.0, 3.0)
    assert mean_of(np.array([0.0, 0.0, 0.0, 90.0])).low == 0.0


@pytest.mark.parametrize(("degrees", "quantile"), [(1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (19, 2.093)])
def test_students_quantiles_are_those_of_the_tables(degrees: int, quantile: float) -> None:
    assert student(degrees) == pytest.approx(quantile, rel=0.02)


@pytest.mark.parametrize(("kind", "expected"), [("gaussian", 1), ("lasting", (1 + 0.5) / (1 - 0.5))])
def test_how_alike_steps_are_is_found_and_rather_too_much_than_too_little(kind: str, expected: float) -> None:
    rows = _series(1, 4, 500, kind)
    found = correlation_steps(rows - rows.mean(axis=1, keepdims=True))
    assert 0.95 <= found / expected <= 1.6
