"""Rounds: from which moment on ranks are compared, which steps are looked at, and what ticks make of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hvdtrain.timeline.analysis.lateness import latest
from hvdtrain.timeline.analysis.rank_steps import from_stamps, from_ticks
from hvdtrain.timeline.columns import StepTable
from tests.support.step_tables import columns_of, table_of
from tests.support.timelines import Turn, trace_of

RANKS, STEPS, WORK_MS = 3, 40, 10.0


def _table(**more: object) -> StepTable:
    return table_of(np.full((RANKS, STEPS), WORK_MS), **more)  # type: ignore[arg-type]


def test_a_step_after_one_without_stamps_begins_at_its_own_start() -> None:
    """It would seem as long as the steps between otherwise."""
    keep = np.r_[0:10, 20:STEPS]
    whole, thinned = from_stamps(_table()), from_stamps(columns_of(_table(), keep))
    assert thinned.work_ms.max() <= whole.work_ms.max() + 1e-6
    assert thinned.work_ms.shape[1] == whole.work_ms.shape[1] - 10


def test_steps_after_an_evaluation_are_left_out_while_enough_others_remain() -> None:
    aside = np.zeros((RANKS, STEPS))
    aside[:, 20::5] = 50.0
    found = from_stamps(_table(more_ms={"aside": aside}))
    assert not set(found.column.tolist()) & set(range(20, STEPS, 5))
    assert len(found.column) == STEPS - 2 - 4, "the first two warm up"
    everywhere = from_stamps(_table(more_ms={"aside": np.full((RANKS, STEPS), 50.0)}))
    assert len(everywhere.column) == STEPS - 2


def test_long_runs_are_looked_at_along_all_of_their_length() -> None:
    steps = 300_000
    start = np.arange(steps, dtype=np.float64) * 1e4
    late_us = {"start_us": 0.0, "ready_us": 5e3, "released_us": 6e3, "end_us": 6e3}
    times = {name: np.tile(start + late, (RANKS, 1)) for name, late in late_us.items()}
    number = np.arange(1, steps + 1, dtype=np.int32)
    found = from_stamps(
        replace(_table(), step=number, block=0 * number, parts_us={"aside": 0 * times["end_us"]}, **times)
    )
    assert found.work_ms.size <= 1 << 18
    quarters = np.histogram(found.step, bins=4, range=(0, steps))[0]
    assert quarters.min() > 0.9 * quarters.max()
    assert found.step[-1] == steps
    assert np.median(np.diff(found.step)) == 1, "stretches of steps that follow each other"


def _turn(step: int, late_us: float, ranks: int = 2, first_us: float = 0.0) -> Turn:
    begin = first_us + 1e5 * step
    ticks = {rank: begin + 1e3 + late_us * rank for rank in range(ranks)}
    return Turn("grad", begin, {"NEGOTIATE_ALLREDUCE": 2e3, "MPI_ALLREDUCE": 1e3}, ticks=ticks)


def test_the_first_turn_of_ticks_is_no_round() -> None:
    """Ranks came late to it, by what the program did before."""
    turns = [_turn(0, 3e5, ranks=4), *(_turn(step, 10.0, ranks=4, first_us=1e6) for step in range(1, 21))]
    found = from_ticks([trace_of(turns)])
    assert (found.source, found.step_ms) == ("ticks", pytest.approx(100.0))
    lag = found.work_ms - found.work_ms[0]
    np.testing.assert_allclose(lag.T, np.broadcast_to([0, 0.01, 0.02, 0.03], lag.T.shape), atol=1e-6)
    np.testing.assert_allclose(found.work_ms[0], found.work_ms[0, -1], atol=1e-9)
    assert from_ticks([trace_of(turns[:3])]) is None, "too few"
    assert from_ticks([trace_of([Turn("x", 10.0 * i, {"ALLREDUCE": 1.0}) for i in range(9)])]) is None, "no ticks"


def test_ticks_of_broadcasts_and_of_each_pass_are_no_steps() -> None:
    """A checkpoint in every second step broadcasts; a divided gradient is summed in each of four passes."""
    turns = [replace(_turn(step, 3e3), tensor=f"broadcast.{i}") for step in range(0, 40, 2) for i in range(2)]
    turns += [
        replace(_turn(step, 3e3, first_us=1.2e4 * i), tensor=f"sum.{i % 2}") for step in range(40) for i in range(8)
    ]
    for tensor in range(20):  # their first steps have ticks
        each = [replace(_turn(step, 10.0), tensor=f"allreduce.{tensor}") for step in range(40)]
        turns += [replace(turn, ticks={}) if step >= 4 + tensor else turn for step, turn in enumerate(each)]
    found = from_ticks([trace_of(sorted(turns, key=lambda turn: turn.start_us))])
    assert found is not None and found.work_ms.shape == (2, 21)


def test_ticks_are_read_until_a_turn_in_which_a_rank_is_missing() -> None:
    """After it two ticks may be one rank's, so the order of readiness is unknown."""
    turns = [_turn(step, 10.0) for step in range(20)]
    turns[12] = replace(turns[12], ticks={0: turns[12].ticks[0]})
    found = from_ticks([trace_of(turns)])
    assert found.work_ms.shape == (2, 10), "12 turns, less the first one and the one that begins there"


def test_of_steps_that_are_all_alike_only_many_other_ranks_show_that_one_is_late() -> None:
    """Its own scatter says nothing: what lasts may be chance."""
    ranks = 16
    generator = np.random.default_rng(5)
    walk = np.cumsum(generator.normal(0, 1.0, (ranks, 12)), axis=1)
    work = 100 + walk - walk.mean(axis=1, keepdims=True) + np.linspace(-0.1, 0.1, ranks)[:, None]
    work[1] += 2.5
    assert latest(work)[0] == [1]
