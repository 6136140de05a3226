from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvdtrain.config.windows import ALL
from hvdtrain.observe import span_trace
from hvdtrain.observe.span_trace import SpanTrace
from hvdtrain.runtime.clock import Pair
from hvdtrain.spans import EXCHANGE, MAIN, Spans
from hvdtrain.timeline.columns import BucketFacts
from hvdtrain.timeline.steps import on_one_clock, read_span_files, wall_clock_us
from tests.support.step_tables import read_spans
from tests.timeline.test_steps import block, start, write

FACTS = BucketFacts("gradients/0", ["w"], [[2, 3]], "float32", 16)


def trace(folder: Path, monkeypatch: pytest.MonkeyPatch, rank: int, at_us: float, clock: str, number: int = 0) -> None:
    """A rank's file of one step: forward from 100 to 150 us after `at_us` of its clock, an exchange to 170."""
    now = [round(at_us * 1e3)]
    spans = Spans(lambda: now[0])
    monkeypatch.setattr(span_trace, "clock_id", lambda: clock)
    monkeypatch.setattr(span_trace, "read_clocks", lambda: Pair(at_us + 5e15, at_us))
    file = SpanTrace(spans, folder, rank, "host (1)", ALL, pytest.fail, number)
    spans.step = 1
    spans.labels[EXCHANGE] = vars(FACTS)
    now[0] += 100_000
    with spans("forward"):
        now[0] += 50_000
    spans.record("exchange", now[0], EXCHANGE, now[0] + 20_000)
    file.close()


def test_spans_have_names_tracks_buckets_and_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace(tmp_path, monkeypatch, 0, 1e6, "x")
    (found,) = read_spans(tmp_path)
    assert (found.rank, found.host, found.clock_error_us) == (0, "host (1)", 0)
    rows = zip([found.names[n] for n in found.name], found.track.tolist(), found.step.tolist(), strict=True)
    assert list(rows) == [("forward", MAIN, 1), ("exchange", EXCHANGE, 1)]
    assert found.start_us.tolist() == pytest.approx([1e6 + 100, 1e6 + 150])
    assert found.end_us.tolist() == pytest.approx([1e6 + 150, 1e6 + 170])
    assert found.buckets == {EXCHANGE: FACTS}
    assert wall_clock_us(read_span_files(tmp_path)) == 5e15


def test_files_of_other_starts_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, ranks in ((0, 3), (1, 1), (2, 1)):
        for rank in range(ranks):
            trace(tmp_path, monkeypatch, rank, 1e6 * (1 + number), "x", number)
    size = (tmp_path / "spans-rank-0.json").stat().st_size + 100
    for asked, number in ((None, 2), (1, 1)):
        (found,) = read_span_files(tmp_path, size, asked)  # three would be more
        assert found.start == number and found.start_us[0] == pytest.approx(1e6 * (1 + number) + 100)
    assert [(spans.rank, spans.start_us[0]) for spans in read_spans(tmp_path)] == [(0, pytest.approx(3e6 + 100))]


@pytest.mark.parametrize(("clock", "offset_us"), [("x", 0.0), ("y", 4e8)])
def test_other_clocks_are_moved_onto_rank_0s(
    clock: str, offset_us: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace(tmp_path, monkeypatch, 0, 1e9, "x")
    trace(tmp_path, monkeypatch, 1, 1e9 - offset_us, clock)
    told = {"offset_us": [0.0, offset_us], "error_us": [0.0, 7.0 if offset_us else 0.0]}
    write(tmp_path, {**start(0), "clock": told}, block(1, clock=told))
    found = read_spans(tmp_path)[1]
    assert found.start_us[0] == pytest.approx(1e9 + 100, abs=1e-3)
    assert found.clock_error_us == (7.0 if offset_us else 0.0)


def test_a_drifting_clock_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace(tmp_path, monkeypatch, 0, 1e9, "x")
    trace(tmp_path, monkeypatch, 1, 1e9, "y")
    early, late = ({"offset_us": [0.0, us], "error_us": [0.0, 1.0]} for us in (0.0, 30.0))
    write(tmp_path, {**start(0), "clock": early}, block(1, clock=late))  # which ends 230 us after the start's origin
    found = read_spans(tmp_path)[1]  # at 0 and 200 us of its own clock the offset is known, at 100 it is between
    assert found.start_us.tolist() == pytest.approx([1e9 + 100 + 15, 1e9 + 150 + 22.5], rel=0, abs=1e-3)


def test_without_a_comparison_the_wall_clocks_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace(tmp_path, monkeypatch, 0, 1e9, "x")
    trace(tmp_path, monkeypatch, 1, 3e9, "y")
    found = read_spans(tmp_path)[1]
    assert found.start_us[0] == pytest.approx(3e9 + 100) and found.clock_error_us == float("inf")


def test_what_is_no_trace_of_ours_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace(tmp_path, monkeypatch, 0, 1e9, "x")
    whole = json.loads((tmp_path / "spans-rank-0.json").read_text())
    for rank, content in enumerate(["", "[", "{}", "[1]", json.dumps(whole[:2]), json.dumps([*whole, {"ph": "X"}])], 1):
        (tmp_path / f"spans-rank-{rank}.json").write_text(content)
    assert [spans.rank for spans in read_spans(tmp_path)] == [0]
    assert read_spans(tmp_path / "nothing") == []


def test_of_more_than_is_asked_for_the_first_ranks_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in (0, 2, 10):
        trace(tmp_path, monkeypatch, rank, 0.0, "a")
    sizes = {rank: (tmp_path / f"spans-rank-{rank}.json").stat().st_size for rank in (0, 2, 10)}
    found = [spans.rank for spans in on_one_clock(read_span_files(tmp_path, sizes[0] + sizes[2]), [])]
    assert found == [0, 2]
    assert wall_clock_us(read_span_files(tmp_path, sizes[0])) == wall_clock_us(read_span_files(tmp_path)) is not None
    assert wall_clock_us(read_span_files(tmp_path, sizes[0] - 1)) is None


@pytest.mark.parametrize("most", [1, 6, 7, 20, 21, 100])
def test_of_a_long_file_the_last_spans_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    now = [0]
    spans = Spans(lambda: now[0])
    monkeypatch.setattr(span_trace, "read_clocks", lambda: Pair(5e15, 0.0))
    file = SpanTrace(spans, tmp_path, 0, "host", ALL, pytest.fail, 0)
    for step in range(1, 22):
        file.begin_step(step)
        spans.step = step
        with spans("forward"):
            now[0] += 1000
    file.close()
    (found,) = read_span_files(tmp_path, most_spans=most)
    assert found.step.tolist() == list(range(1, 22))[-most:]
    assert found.dropped == max(0, 21 - most) and len(found.end_us) == min(most, 21)
