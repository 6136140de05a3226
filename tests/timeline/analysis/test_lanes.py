"""The picture of a few steps: which steps, which bars, and how many."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from hvdtrain.spans import EXCHANGE, MAIN
from hvdtrain.timeline.analysis.analysis import Lane
from hvdtrain.timeline.analysis.lanes import STEPS, window_lanes
from hvdtrain.timeline.columns import RankSpans, RunTrace
from tests.support.timelines import Turn, trace_of

MOST = 400

Row = tuple[str, int, int, float, float]
"""Name, track, step, start and end in ms."""


def _spans(rows: Sequence[Row], rank: int = 0) -> RankSpans:
    names = list(dict.fromkeys(row[0] for row in rows))
    return RankSpans(
        rank,
        "host0",
        names,
        np.array([names.index(row[0]) for row in rows], np.int16),
        np.array([row[1] for row in rows], np.int32),
        np.array([row[2] for row in rows], np.int32),
        np.array([row[3] for row in rows], float) * 1e3,
        np.array([row[4] for row in rows], float) * 1e3,
        {},
    )


def _steps(lengths_ms: Sequence[float], first: int = 1) -> list[Row]:
    """Steps that follow each other, each with one part of its length."""
    ends = np.cumsum(lengths_ms)
    rows: list[Row] = []
    for number, (length, end) in enumerate(zip(lengths_ms, ends, strict=True), first):
        rows += [("step", MAIN, number, end - length, end), ("backward", MAIN, number, end - length, end)]
    return rows


def _drawn(*spans: RankSpans) -> list[Lane]:
    return window_lanes(RunTrace(Path("run"), len(spans), spans=list(spans)))


def test_the_parts_of_a_step_and_what_travels_meanwhile_are_a_lane_each() -> None:
    rows: list[Row] = [("step", MAIN, 3, 0, 30), ("forward", MAIN, 3, 0, 10), ("backward", MAIN, 3, 10, 20)]
    rows += [("wait", MAIN, 3, 20, 25), ("exchange", EXCHANGE, 3, 10, 18), ("exchange", EXCHANGE + 1, 3, 18, 24)]
    found = _drawn(_spans(rows))
    assert [lane.label for lane in found] == ["rank 0 on host0", "rank 0, exchange"]
    assert [piece.name for piece in found[0].slices] == ["forward", "backward", "wait"]
    assert [(piece.start_ms, piece.end_ms) for piece in found[1].slices] == [(10.0, 24.0)]
    assert found[0].slices[0].start_ms == 0.0 and found[0].slices[0].step == 3


def test_ranks_stand_in_their_order_on_one_time() -> None:
    late = [("step", MAIN, 1, 5.0, 30.0), ("backward", MAIN, 1, 5.0, 30.0)]
    found = _drawn(_spans(late, rank=1), _spans([("step", MAIN, 1, 0, 30), ("backward", MAIN, 1, 0, 30)]))
    assert [lane.label for lane in found] == ["rank 0 on host0", "rank 1 on host0"]
    assert [lane.slices[0].start_ms for lane in found] == [0.0, 5.0]


def test_what_follows_the_last_step_is_not_drawn_and_what_outlasts_it_is_cut() -> None:
    rows = [*_steps([30.0]), ("checkpoint", MAIN, 1, 30.0, 20_030.0), ("exchange", EXCHANGE, 1, 20.0, 40.0)]
    found = _drawn(_spans(rows))
    assert max(piece.end_ms for lane in found for piece in lane.slices) == 30.0
    assert all(piece.name != "checkpoint" for lane in found for piece in lane.slices)


def test_the_window_is_slow_but_there_are_slower_ones() -> None:
    """The first step is unlike the others, one has a pause; three of thirty are slow."""
    lengths = [90.0, *[10.0] * 30]
    lengths[10:13] = [14.0] * 3
    lengths[25] = 1000.0
    found = _drawn(_spans(_steps(lengths)))
    pieces = found[0].slices
    steps = [piece.step for piece in pieces]
    assert steps == list(range(steps[0], steps[0] + STEPS))
    assert 1 not in steps and 26 not in steps
    assert set(steps) & {11, 12, 13}


def test_the_first_step_is_not_drawn_where_there_are_others() -> None:
    found = _drawn(_spans(_steps([15.0, 10.0, 10.0, 10.0, 10.0, 20.0])))
    assert [piece.step for piece in found[0].slices] == [2, 3, 4, 5]


def test_the_steps_of_a_window_follow_each_other() -> None:
    rows = [*_steps([10.0] * 3, first=2), *[(n, t, s, a + 1e4, b + 1e4) for n, t, s, a, b in _steps([10.0] * 5, 50)]]
    found = _drawn(_spans(rows))
    assert max(piece.end_ms for piece in found[0].slices) == pytest.approx(10.0 * STEPS)


def test_of_too_many_the_longest_are_drawn() -> None:
    many = [("op", MAIN, 1, 0.01 * i, 0.01 * i + (0.009 if i % 5 else 0.0095)) for i in range(5 * MOST)]
    found = _drawn(_spans([("step", MAIN, 1, 0, 30), *many]))
    assert len(found[0].slices) == MOST
    assert all(piece.end_ms - piece.start_ms > 0.0093 for piece in found[0].slices)
    assert [piece.start_ms for piece in found[0].slices] == sorted(piece.start_ms for piece in found[0].slices)


def test_so_it_is_of_transfers() -> None:
    turns = [Turn("x", 10.0 * i, {"MPI_ALLREDUCE": 5.0 if i % 2 else 6.0}) for i in range(2 * MOST)]
    run = RunTrace(Path("run"), 1, spans=[_spans(_steps([8.0]))], horovod=[trace_of(turns)])
    (lane,) = [lane for lane in window_lanes(run) if lane.label == "Horovod"]
    assert len(lane.slices) == MOST
    assert all(piece.end_ms - piece.start_ms == pytest.approx(0.006) for piece in lane.slices)


def test_without_steps_there_is_no_picture() -> None:
    assert _drawn(_spans([("checkpoint", MAIN, 0, 0.0, 5.0)])) == []


def test_steps_around_a_change_are_shown_after_one_another() -> None:
    rows = _steps([10.0] * 30, first=1) + [
        (name, track, step + 100, start + 5000, end + 5000) for name, track, step, start, end in _steps([30.0] * 20)
    ]
    run = RunTrace(Path("run"), 1, spans=[_spans(rows)])
    (lane,) = window_lanes(run, [10, 60])
    steps = sorted({piece.step for piece in lane.slices})
    assert {8, 9, 10, 11, 12} < set(steps) and max(steps) > 100 and not {60, 61} & set(steps)
    starts = [piece.start_ms for piece in lane.slices]
    ends = [piece.end_ms for piece in lane.slices]
    assert starts == sorted(starts) and all(a <= b for a, b in zip(ends, starts[1:], strict=False))
    assert ends[-1] < 400.0  # the time between the windows is left out
