"""The picture of a few steps: which steps, which bars, and how many."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdtrain.spans import EXCHANGE, MAIN
from hvdtrain.timeline.analysis.analysis import Lane
from hvdtrain.timeline.analysis.lanes import STEPS, window_lanes
from hvdtrain.timeline.columns import RankSpans, RunTrace
from tests.support.timelines import Row, Turn, spans_of, trace_of

MOST = 400


def _steps(lengths_ms: Sequence[float], first: int = 1, begin_ms: float = 0.0) -> list[Row]:
    """Steps that follow each other, each with one part of its length."""
    rows: list[Row] = []
    for number, (length, end) in enumerate(zip(lengths_ms, begin_ms + np.cumsum(lengths_ms), strict=True), first):
        rows += [(name, MAIN, number, end - length, end) for name in ("step", "backward")]
    return rows


def _drawn(*spans: RankSpans, **more: Any) -> list[Lane]:
    return window_lanes(RunTrace(Path("run"), len(spans), spans=list(spans), **more))


def test_the_parts_of_a_step_and_what_travels_meanwhile_are_a_lane_each() -> None:
    rows: list[Row] = [("step", MAIN, 3, 0, 30), ("forward", MAIN, 3, 0, 10), ("backward", MAIN, 3, 10, 20)]
    rows += [("wait", MAIN, 3, 20, 25), ("exchange", EXCHANGE, 3, 10, 18), ("exchange", EXCHANGE + 1, 3, 18, 24)]
    found = _drawn(spans_of(rows))
    assert [lane.label for lane in found] == ["rank 0 on host0", "rank 0, exchange"]
    assert [piece.name for piece in found[0].slices] == ["forward", "backward", "wait"]
    assert [(piece.start_ms, piece.end_ms) for piece in found[1].slices] == [(10.0, 24.0)]
    assert found[0].slices[0].start_ms == 0.0 and found[0].slices[0].step == 3


def test_ranks_stand_in_their_order_on_one_time() -> None:
    late = [("step", MAIN, 1, 5.0, 30.0), ("backward", MAIN, 1, 5.0, 30.0)]
    found = _drawn(spans_of(late, rank=1), spans_of([("step", MAIN, 1, 0, 30), ("backward", MAIN, 1, 0, 30)]))
    assert [lane.label for lane in found] == ["rank 0 on host0", "rank 1 on host0"]
    assert [lane.slices[0].start_ms for lane in found] == [0.0, 5.0]


def test_what_follows_the_last_step_is_not_drawn_and_what_outlasts_it_is_cut() -> None:
    rows = [*_steps([30.0]), ("checkpoint", MAIN, 1, 30.0, 20_030.0), ("exchange", EXCHANGE, 1, 20.0, 40.0)]
    found = _drawn(spans_of(rows))
    assert max(piece.end_ms for lane in found for piece in lane.slices) == 30.0
    assert all(piece.name != "checkpoint" for lane in found for piece in lane.slices)


def test_the_window_is_slow_but_there_are_slower_ones() -> None:
    """The first step is unlike the others, one has a pause; three of thirty are slow."""
    lengths = [90.0, *[10.0] * 30]
    lengths[10:13] = [14.0] * 3
    lengths[25] = 1000.0
    steps = [piece.step for piece in _drawn(spans_of(_steps(lengths)))[0].slices]
    assert steps == list(range(steps[0], steps[0] + STEPS))
    assert not {1, 26} & set(steps) and set(steps) & {11, 12, 13}


def test_the_steps_of_a_window_follow_each_other() -> None:
    rows = [*_steps([10.0] * 3, first=2), *_steps([10.0] * 5, first=50, begin_ms=1e4)]
    assert max(piece.end_ms for piece in _drawn(spans_of(rows))[0].slices) == pytest.approx(10.0 * STEPS)


@pytest.mark.parametrize("kind", ["parts", "transfers"])
def test_of_too_many_the_longest_are_drawn(kind: str) -> None:
    rows, horovod = _steps([30.0]), []
    if kind == "parts":
        rows += [("op", MAIN, 1, 0.01 * i, 0.01 * i + (0.009 if i % 5 else 0.0095)) for i in range(5 * MOST)]
    else:
        turns = [Turn("x", 10.0 * i, {"MPI_ALLREDUCE": 9.5 if i % 2 else 9.0}) for i in range(2 * MOST)]
        horovod = [trace_of(turns)]
    slices = _drawn(spans_of(rows), horovod=horovod)[-1].slices
    assert len(slices) == MOST and all(piece.end_ms - piece.start_ms > 0.0093 for piece in slices)
    assert [piece.start_ms for piece in slices] == sorted(piece.start_ms for piece in slices)


def test_without_steps_there_is_no_picture() -> None:
    assert _drawn(spans_of([("checkpoint", MAIN, 0, 0.0, 5.0)])) == []


def test_steps_around_a_change_are_shown_after_one_another() -> None:
    rows = [*_steps([10.0] * 30), *_steps([30.0] * 20, first=101, begin_ms=5000.0)]
    (lane,) = window_lanes(RunTrace(Path("run"), 1, spans=[spans_of(rows)]), [10, 60])
    steps = {piece.step for piece in lane.slices}
    assert {8, 9, 10, 11, 12} < steps and max(steps) > 100 and not {60, 61} & steps
    assert all(one.end_ms <= after.start_ms for one, after in pairwise(lane.slices))
    assert lane.slices[-1].end_ms < 400.0  # the time between the windows is left out
