from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from hvdtrain.errors import ConfigError
from hvdtrain.observe.sinks import Background, FunctionSink, sink_maker
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


def test_every_record_comes_in_order_from_a_thread_of_the_sink() -> None:
    sink = Keeping()
    background = Background(lambda: sink, "mine", warn=pytest.fail)
    for step in range(1000):
        background.put({"step": step})
    background.close(TIMEOUT_S)
    assert [record["step"] for record in sink.records] == list(range(1000))
    assert sink.threads == {"sink mine"}
    assert sink.closed == 1


def test_a_hanging_sink_does_not_block_training_and_lost_records_are_counted() -> None:
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
    assert said == ["the metric sink slow did not finish within 0 s; the run ends without it"]
    gate.set()
    background.close(TIMEOUT_S)
    assert taken == list(range(11))
    assert said[1:] == ["the metric sink slow is too slow: 89 records were dropped"]


def test_a_failing_sink_is_reported_and_paused() -> None:
    called: list[int] = []

    def fail(record: Mapping[str, Any]) -> None:
        called.append(record["step"])
        raise OSError("no network")

    said: list[str] = []
    background = Background(lambda: FunctionSink(fail), "web", said.append, clock=lambda: 0.0)
    for step in range(50):
        background.put({"step": step})
    background.close(TIMEOUT_S)
    assert called == [0, 1, 2]
    assert said == [
        "the metric sink web failed: OSError: no network",
        "the metric sink web failed 3 times in a row: it gets no records for 60 s",
    ]


def test_a_sink_that_was_left_alone_is_tried_again() -> None:
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

    said: list[str] = []
    background = Background(lambda: FunctionSink(write), "web", said.append, clock=clock)
    for step in range(100):
        background.put({"step": step})
    background.close(TIMEOUT_S)
    assert called[:3] == [0, 1, 2]
    later = called[3:]
    assert 50 <= later[0] <= 65 and later == list(range(later[0], 100)), "after a minute every record"
    assert len(said) == 2


def test_a_sink_that_fails_now_and_then_gets_the_rest() -> None:
    taken: list[int] = []

    def sometimes(record: Mapping[str, Any]) -> None:
        if record["step"] in (1, 3, 5, 6):
            raise ValueError
        taken.append(record["step"])

    background = Background(lambda: FunctionSink(sometimes), "shaky", lambda text: None)
    for step in range(8):
        background.put({"step": step})
    background.close(TIMEOUT_S)
    assert taken == [0, 2, 4, 7]


def test_a_sink_that_cannot_be_created_is_reported() -> None:
    def make() -> Keeping:
        raise KeyError("TRACKER_URL")

    said: list[str] = []
    background = Background(make, "web", said.append)
    for step in range(5):
        background.put({"step": step})
    background.close(TIMEOUT_S)
    assert said == ["the metric sink web cannot be created: KeyError: 'TRACKER_URL'"]


def test_changes_of_a_record_by_one_sink_are_invisible_to_others() -> None:
    record = {"step": 1, "config": {"seed": 0}}

    def spoil(mine: Any) -> None:
        mine.pop("step")
        mine["config"]["seed"] = 5

    background = Background(lambda: FunctionSink(spoil), "rude", pytest.fail)
    background.put(record)
    background.close(TIMEOUT_S)
    assert record == {"step": 1, "config": {"seed": 0}}


@pytest.mark.parametrize("make", [Keeping, lambda: Keeping, lambda: lambda record: None], ids=["object", "class", "fn"])
def test_what_can_be_a_sink(make: Callable[[], Any]) -> None:
    sink = sink_maker(make())()
    sink.write({"step": 1})
    sink.close()


def test_what_cannot() -> None:
    with pytest.raises(ConfigError, match=r"write\(record\) and close\(\)"):
        sink_maker(3)
    with pytest.raises(ConfigError, match="found: dict"):
        sink_maker(dict)
