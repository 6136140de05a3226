from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.config.windows import ALL, OFF, Window
from hvdtrain.observe.span_trace import LAST_STEPS, SpanTrace, TraceFile
from hvdtrain.spans import DEVICE, EXCHANGE, Spans
from tests.support.full_disk import room_for
from tests.support.trace_format import check_trace


def _read(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text())
    check_trace(events)
    return events


def test_a_trace_file_is_whole_after_every_write(tmp_path: Path) -> None:
    path = tmp_path / "new" / "trace.json"
    head = {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "x"}}
    file = TraceFile(path, [head])
    assert _read(path) == [head]
    written = [head]
    for number in range(3):
        more = [{"name": f"a {number}", "ph": "X", "pid": 0, "tid": 0, "ts": i + 10 * number, "dur": 0} for i in (0, 1)]
        file.append(more)
        file.append([])
        written += more
        assert _read(path) == written
    with room_for(path, 500), pytest.raises(OSError, match="too large"):
        file.append([more[0]] * 100)
    assert _read(path) == written
    file.append(more)
    assert _read(path) == [*written, *more], "a disk that gets full leaves the trace valid"
    file.close()
    with pytest.raises(FileExistsError):
        TraceFile(path, [head])
    assert _read(path) == [*written, *more]


def _trace(folder: Path, window: Window, rank: int = 0, **how: Any) -> tuple[SpanTrace, Spans]:
    spans = Spans(**how)
    return SpanTrace(spans, folder, rank, "node", window, warn=pytest.fail), spans


def _train(trace: SpanTrace, spans: Spans, first: int, last: int) -> None:
    for step in range(first, last + 1):
        trace.begin_step(step)
        spans.step = step
        with spans("forward"):
            pass
        start = spans.now()
        with spans("wait"):
            pass
        spans.record("exchange", start, EXCHANGE)


def _steps(path: Path) -> list[int]:
    return sorted({event["args"]["step"] for event in _read(path) if event["ph"] == "X"})


@pytest.mark.parametrize(
    ("window", "steps"),
    [(Window(3, 8), range(3, 9)), (Window(291, 295), ()), (ALL, range(301)), (Window(400, 500), ()), (OFF, ())],
    ids=["early", "late", "all", "never", "empty"],
)
def test_the_window_and_the_last_steps_are_written_once(tmp_path: Path, window: Window, steps: Sequence[int]) -> None:
    trace, spans = _trace(tmp_path, window, 3)
    with spans("evaluation"):
        pass
    path = tmp_path / "spans-rank-3.json"
    _train(trace, spans, 1, 10)
    if window == Window(3, 8):
        assert _steps(path) == [0, *range(3, 9)], "it is on disk once it is over"
    _train(trace, spans, 11, 300)
    trace.close()
    assert _steps(path) == sorted({0, *steps, *range(300 - LAST_STEPS + 1, 301)})
    names = [(event["name"], event["args"]["step"]) for event in _read(path) if event["ph"] == "X"]
    assert len(names) == len(set(names))
    assert {event["pid"] for event in _read(path)} == {3}
    threads = {e["tid"]: e["args"]["name"] for e in _read(path) if e["name"] == "thread_name"}
    assert threads == {0: "training thread", EXCHANGE: "exchange of bucket 0"}
    assert _read(path)[0]["args"]["name"] == "rank 3 on node"


def test_many_spans_a_step_are_written_before_they_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvdtrain.observe.span_trace.CAPACITY", 1 << 10)
    trace, spans = _trace(tmp_path, Window(1, 200), capacity=1 << 10)
    for step in range(1, 211):
        trace.begin_step(step)
        spans.step = step
        for bucket in range(22):
            spans.record("exchange", spans.now(), EXCHANGE + bucket)
    trace.close()
    exchanges = Counter(e["args"]["step"] for e in _read(tmp_path / "spans-rank-0.json") if e["ph"] == "X")
    assert exchanges == dict.fromkeys(range(1, 211), 22)


def test_what_a_device_tells_a_step_late_is_in_the_window(tmp_path: Path) -> None:
    trace, spans = _trace(tmp_path, Window(1, 3))
    for step in range(1, 60):
        trace.begin_step(step)
        spans.step = step
        spans.record("optimizer", spans.now(), DEVICE, step=step - 1)
    trace.close()
    assert set(range(1, 4)) <= set(_steps(tmp_path / "spans-rank-0.json"))


def test_a_later_start_adds_a_file(tmp_path: Path) -> None:
    for _ in range(3):
        trace, spans = _trace(tmp_path, ALL)
        _train(trace, spans, 1, 3)
        trace.close()
    names = ["spans-rank-0-1.json", "spans-rank-0-2.json", "spans-rank-0.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_a_failed_write_is_reported_once_and_raises_nothing(tmp_path: Path) -> None:
    (tmp_path / "timeline").write_text("a file where the folder should be")
    said: list[str] = []
    spans = Spans()
    trace = SpanTrace(spans, tmp_path / "timeline", 0, "node", ALL, warn=said.append)
    _train(trace, spans, 1, 500)
    trace.close()
    assert len(said) == 1 and "training continues" in said[0]
