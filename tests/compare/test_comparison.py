"""Comparisons of runs: alignment, differences, intervals, and what cannot be compared."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from hvdtrain.compare.comparison import NOISE, SEEDS, Comparison, Row, compare, difference_by_noise, difference_by_seeds
from hvdtrain.compare.read import Curve, read_run
from hvdtrain.compare.view import is_significant
from hvdtrain.errors import ConfigError, TraceError
from tests.support.gallery import Gallery
from tests.support.journals import FakeRun


def _falling(steps: int, *, seed: int, offset: float = 0.0) -> list[float]:
    noise = np.random.default_rng(seed).normal(0, 0.1, steps)
    return [float(value) for value in 2 / np.sqrt(np.arange(1, steps + 1)) + offset + noise]


def _compared(*runs: FakeRun) -> Comparison:
    return compare([read_run(run.folder) for run in runs])


def _row(comparison: Comparison, figure: str = "loss", axis: str = "samples") -> Row:
    return next(row for row in comparison.rows if (row.figure, row.axis) == (figure, axis))


def test_a_run_equals_itself(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "a").start(_falling(100, seed=1), evaluations={100: {"loss": 0.5, "accuracy": 0.9}})
    comparison = _compared(run, run)
    assert sorted((row.figure, row.axis) for row in comparison.rows) == [
        (figure, axis) for figure in ("accuracy", "heldout_loss", "loss") for axis in ("samples", "seconds")
    ]
    for found in (row.differences[1] for row in comparison.rows):
        assert found.value == 0 and found.low <= 0 <= found.high and not is_significant(found)
    assert not comparison.options and not comparison.versions and not comparison.machines


@pytest.mark.parametrize("seeds", [1, 3])
def test_the_other_order_has_the_other_sign(tmp_path: Path, seeds: int) -> None:
    def made(name: str, lr: int, offset: float) -> list[FakeRun]:
        losses = [_falling(100, seed=9 * lr + n, offset=offset) for n in range(seeds)]
        return [FakeRun(tmp_path / f"{name}{n}", seed=n, lr=lr).start(each) for n, each in enumerate(losses)]

    first, second = made("a", 1, 0.0), made("b", 2, 0.3)
    for row, other in zip(_compared(*first, *second).rows, _compared(*second, *first).rows, strict=True):
        one, two = row.differences[1], other.differences[1]
        assert is_significant(one) and (one.value, one.low, one.high) == (-two.value, -two.high, -two.low)
        assert row.sources[1] == (NOISE if seeds == 1 else SEEDS)
        assert 0.2 < one.value < 0.4


def test_runs_are_compared_where_all_have_samples_and_seconds(tmp_path: Path) -> None:
    short = FakeRun(tmp_path / "short").start(_falling(60, seed=1), step_s=1.0)
    long = FakeRun(tmp_path / "long", lr=2).start(_falling(100, seed=1), step_s=0.25)
    comparison = _compared(short, long)
    by_samples, by_seconds = _row(comparison), _row(comparison, axis="seconds")
    assert (by_samples.place, by_seconds.place) == (60 * 8, 25.0)
    assert by_samples.differences[1].value == 0, "the same curve"
    assert by_seconds.values[0] != by_seconds.values[1]


def test_how_samples_are_cut_into_steps_changes_nothing(tmp_path: Path) -> None:
    losses = _falling(125, seed=1)  # the window begins within a step of the second run
    fine = FakeRun(tmp_path / "fine", batch=8).start([loss for loss in losses for _ in range(2)], step_s=0.5)
    coarse = FakeRun(tmp_path / "coarse", batch=16).start(losses, step_s=1.0)
    for row in _compared(fine, coarse).rows:
        assert row.values[1] == pytest.approx(row.values[0])
        assert row.differences[1].value == pytest.approx(0, abs=1e-12)


def test_overwritten_steps_and_evaluations_do_not_count(tmp_path: Path) -> None:
    losses, bad = _falling(40, seed=1), [99.0] * 20
    whole = FakeRun(tmp_path / "whole").start(losses, evaluations={20: {"loss": 1.0}, 30: {"loss": 0.5}})
    resumed = FakeRun(tmp_path / "resumed").start(
        [*losses[:20], *bad], evaluations={20: {"loss": 1.0}, 25: {"loss": 99.0}}
    )
    resumed.start(losses[20:], after=20)
    killed = FakeRun(tmp_path / "killed").start([*losses[:20], *bad]).start(losses[20:35], after=20, end="")
    comparison = _compared(whole, resumed, killed)
    assert _row(comparison).place == 35 * 8  # the steps after 35 were undone, and not done again
    assert _row(comparison, "heldout_loss").place == 20 * 8  # the evaluation of step 25 is of a state that was undone
    for row in comparison.rows:
        assert [each.value for each in row.differences[1:] if each is not None] in ([0.0, 0.0], [0.0])
    assert "killed" in comparison.states[2] and "2 starts" in comparison.states[1]


def test_a_run_that_began_from_another_one_is_compared_where_it_has_steps(tmp_path: Path) -> None:
    losses = _falling(100, seed=1)
    whole = FakeRun(tmp_path / "whole").start(losses)
    tail = FakeRun(tmp_path / "tail").start(losses[90:], after=90)
    found = _row(_compared(whole, tail))
    assert (found.place, found.window) == (800, 80)
    assert found.values[0] == found.values[1] == pytest.approx(np.mean(losses[90:]))


def test_evaluations_at_unequal_steps_are_interpolated(tmp_path: Path) -> None:
    a = FakeRun(tmp_path / "a").start([1.0] * 40, evaluations={10: {"loss": 3.0}, 30: {"loss": 1.0}})
    b = FakeRun(tmp_path / "b").start([1.0] * 40, evaluations={20: {"loss": 1.5}})
    row = _row(_compared(a, b), "heldout_loss")
    assert (row.place, *row.values) == (160, 2.0, 1.5)
    without = FakeRun(tmp_path / "c").start([1.0] * 40)
    assert {row.figure for row in _compared(a, without).rows} == {"loss"}


def test_losses_of_different_tasks_are_not_compared(tmp_path: Path) -> None:
    def made(name: str, task: str, metric: str) -> FakeRun:
        return FakeRun(tmp_path / name, task=task).start([1.0] * 40, evaluations={40: {"loss": 3.0, metric: 0.5}})

    image, other = made("image", "image", "accuracy"), made("other", "/x/my.py:task", "accuracy")
    assert {row.figure for row in _compared(image, other).rows} == {"accuracy"}
    text = made("text", "language_model", "perplexity")
    with pytest.raises(ConfigError, match="no loss or metric in common"):
        _compared(image, text)
    three = _compared(image, other, made("moved", "image", "accuracy"))
    assert [value is None for value in _row(three).values] == [False, True, False]
    moved = FakeRun(tmp_path / "m", task="/y/my.py:task").start([1.0] * 40)
    assert _row(_compared(other, moved)).values == [1.0, 1.0]  # the same file in another folder


def test_seeds_group_only_runs_that_differ_in_nothing_else(tmp_path: Path) -> None:
    a = [FakeRun(tmp_path / f"a{n}", seed=n).start([1.0 + n / 10] * 40) for n in range(2)]
    b = [FakeRun(tmp_path / f"b{n}", seed=n, lr=1).start([2.0 + n / 10] * 40) for n in range(2)]
    grouped = _compared(a[0], b[0], b[1], a[1])
    assert grouped.columns == [[str(run.folder) for run in group] for group in (a, b)]
    assert list(grouped.options) == ["lr"]
    assert _row(grouped).values == [pytest.approx(1.05), pytest.approx(2.05)]
    alone = _compared(*a)
    assert len(alone.columns) == 2 and "seed" in alone.options and "what a seed changes" in " ".join(alone.notes)
    twice = FakeRun(tmp_path / "again", seed=0).start([1.0] * 40)
    assert len(_compared(a[0], a[1], twice, b[0]).columns) == 4  # equal seeds are no independent runs
    newer = FakeRun(tmp_path / "newer", seed=1).start([1.0] * 40, versions={"torch": "3"})
    assert len(_compared(a[0], newer, b[0]).columns) == 3


def test_intervals_of_seeds_contain_the_true_difference_as_often_as_they_say() -> None:
    chance, hits, trials = np.random.default_rng(0), 0, 2000
    for _ in range(trials):
        a, b = chance.normal(1.0, 0.1, 4), chance.normal(1.5, 0.4, 3)
        found = difference_by_seeds([float(x) for x in a], [float(x) for x in b])
        hits += found.low <= 0.5 <= found.high
    assert 0.93 < hits / trials < 0.98


def test_intervals_of_noise_contain_the_true_difference_as_often_as_they_say() -> None:
    chance, hits, trials = np.random.default_rng(0), 0, 400
    ends = np.arange(1.0, 201.0)
    for _ in range(trials):
        noise = chance.normal(0, 0.2, (2, 200))
        a, b = (Curve(ends - 1, ends, 5 / np.sqrt(ends) + 0.1 * n + noise[n]) for n in range(2))
        found = difference_by_noise(a, b, 100.0, 200.0)
        hits += found.low <= 0.1 <= found.high
    assert 0.91 < hits / trials < 0.98


def test_a_single_run_next_to_seeds_has_the_spread_of_the_seeds() -> None:
    one = difference_by_seeds([1.0, 1.2, 1.4], [2.0])
    assert one.value == pytest.approx(0.8)
    assert one.high - one.value == pytest.approx(4.303 * 0.2 * math.sqrt(1 + 1 / 3), rel=0.01)  # t of 2 degrees


def test_a_loss_that_is_not_finite_is_shown_and_has_no_interval(tmp_path: Path) -> None:
    a = FakeRun(tmp_path / "a").start([1.0] * 40)
    b = FakeRun(tmp_path / "b").start([*[1.0] * 35, None, None, 1.0, None, 1.0])
    row = _row(_compared(a, b))
    assert math.isnan(row.values[1] or 0.0) and not is_significant(row.differences[1])


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    new, damaged = FakeRun(tmp_path / "new").start([]), FakeRun(tmp_path / "damaged").start([1.0])
    damaged.write({"step": 2, "loss": 1.0})
    for folder, said in (
        (tmp_path / "missing", "is not a run"),
        (tmp_path, "is not a run"),
        (new.folder, "no steps yet"),
        (damaged.folder, "cannot be read"),
    ):
        with pytest.raises(TraceError, match=said):
            read_run(folder)


def test_recorded_runs_of_one_and_two_ranks_have_one_curve(gallery: Gallery) -> None:
    comparison = compare([read_run(gallery[name].run) for name in ("one", "two", "resumed")])
    for row in comparison.rows:
        if row.axis == "samples":
            assert all(abs(row.differences[column].value) < 1e-4 for column in (1, 2))
    assert comparison.machines["ranks"] == [1, 2, 2]
    assert all(value is not None and value > 0 for value in comparison.costs["device_hours"])
    assert "2 starts" in comparison.states[2]
