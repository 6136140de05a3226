from __future__ import annotations

import io
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvdtrain.errors import ConfigError
from hvdtrain.observe import sinks
from hvdtrain.observe.journal import Journal
from hvdtrain.observe.output import Progress
from hvdtrain.observe.sinks import Background, FunctionSink, Recorder, sink_maker
from tests.support.journals import read_journal
from tests.support.launch import TIMEOUT_S


class Keeping:
    def __init__(self) -> None:
        self.records: list[Mapping[str, Any]] = []
        self.threads: set[str] = set()
        self.closed = 0

    def write(self, record: Mapping[str, Any]) -> None:
        self.records.append(record)
        self.threads.add(threading.current_thread().name)

    def close(self) -> None:
        self.closed += 1


def _told_of(make: Callable[[], Any], steps: int, **more: Any) -> list[str]:
    """Pass some steps to a sink and close it; return the warnings."""
    said: list[str] = []
    background = Background(make, "web", said.append, **more)
    for step in range(steps):
        background.put({"step": step})
    background.close(TIMEOUT_S)
    return said


def test_every_record_comes_in_order_from_a_thread_of_the_sink() -> None:
    sink = Keeping()
    assert _told_of(lambda: sink, 1000) == []
    assert [record["step"] for record in sink.records] == list(range(1000))
    assert sink.threads == {"sink web"}
    assert sink.closed == 1


def test_a_hanging_sink_does_not_block_training_and_lost_records_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "_POLL_S", 0.001)
    gate, entered = threading.Event(), threading.Event()
    taken: list[int] = []

    def hang(record: Mapping[str, Any]) -> None:
        entered.set()
        gate.wait(TIMEOUT_S)
        taken.append(record["step"])

    said: list[str] = []
    background = Background(lambda: FunctionSink(hang), "slow", said.append, limit=10)
    background.put({"step": 0})
    assert entered.wait(TIMEOUT_S)
    for step in range(1, 100):
        background.put({"step": step})  # would never return if it waited for the sink
    background.close(0.0)
    assert len(said) == 1 and "slow did not finish" in said[0]
    gate.set()
    background.close(TIMEOUT_S)
    assert taken == list(range(11))
    assert len(said) == 2 and "89 records" in said[1]


def test_a_failing_sink_is_reported_and_paused_and_tried_again() -> None:
    now = 0.0
    called: list[int] = []

    def write(record: Mapping[str, Any]) -> None:
        nonlocal now
        called.append(record["step"])
        now += 1.0
        if record["step"] < 3 or record["step"] == 70:
            raise OSError("no network")

    def clock() -> float:
        nonlocal now
        now += 1.0
        return now

    said = _told_of(lambda: FunctionSink(write), 100, clock=clock)
    assert called[:3] == [0, 1, 2]
    later = called[3:]
    assert 50 <= later[0] <= 65 and later == list(range(later[0], 100)), "after a minute every record"
    assert len(said) == 2 and "OSError: no network" in said[0] and "60 s" in said[1]


def test_a_sink_that_fails_now_and_then_gets_the_rest() -> None:
    taken: list[int] = []

    def sometimes(record: Mapping[str, Any]) -> None:
        if record["step"] in (1, 3, 5, 6):
            raise ValueError
        taken.append(record["step"])

    assert len(_told_of(lambda: FunctionSink(sometimes), 8)) == 1
    assert taken == [0, 2, 4, 7]
    (line,) = _told_of(lambda: {}["TRACKER_URL"], 5)
    assert "web" in line and "KeyError: 'TRACKER_URL'" in line, "one that cannot be created"


def test_changes_of_a_record_by_one_sink_are_invisible_to_others() -> None:
    record = {"step": 1, "config": {"seed": 0}}

    def spoil(mine: Any) -> None:
        mine.pop("step")
        mine["config"]["seed"] = 5

    background = Background(lambda: FunctionSink(spoil), "rude", pytest.fail)
    background.put(record)
    background.close(TIMEOUT_S)
    assert record == {"step": 1, "config": {"seed": 0}}


def test_a_sink_is_an_object_a_class_or_a_function() -> None:
    for value in (Keeping(), Keeping, lambda record: None):
        sink = sink_maker(value)()
        sink.write({"step": 1})
        sink.close()
    for value, found in ((3, "int"), (dict, "dict")):
        with pytest.raises(ConfigError, match=found):
            sink_maker(value)


def _recorder(journal: Path) -> tuple[Recorder, io.StringIO]:
    shown = io.StringIO()
    return Recorder(Journal(journal, print), Progress("samples", 0.0, live=False, out=shown)), shown


def test_everything_is_closed_whatever_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "_CLOSE_TIMEOUT_S", TIMEOUT_S)
    recorder, _ = _recorder(tmp_path / "journal")
    taken: list[Mapping[str, Any]] = []
    closed: list[str] = []

    def watch(name: str) -> Any:
        def close() -> None:
            closed.append(name)
            if name == "second":
                raise OSError("disk full")

        return SimpleNamespace(close=close)

    for name in ("first", "second", "third"):
        recorder.add_watcher(watch(name))
    recorder.add_sink(lambda: SimpleNamespace(write=taken.append, close=lambda: closed.append("sink")), "mine")
    recorder.event({"event": "started"})
    with pytest.raises(OSError, match="disk full"):
        recorder.close()
    assert sorted(closed) == ["first", "second", "sink", "third"]
    assert [record["event"] for record in taken] == ["started"]
    recorder.warn("a sink that was left behind speaks")
    assert [line["event"] for line in read_journal(tmp_path / "journal")] == ["started"]


def test_nothing_raises_on_a_full_disk() -> None:
    recorder, shown = _recorder(Path("/dev/full"))
    recorder.event({"event": "started"})
    recorder.warn("the trace ends here")
    assert "warning: the trace ends here" in shown.getvalue()
    recorder.close()
