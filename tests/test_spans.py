from __future__ import annotations

import gc
import threading

import pytest
import torch

from hvdtrain.spans import EXCHANGE, Event, Spans


class Clock:
    """Nanoseconds that pass by one at each look, or as told."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        self.now += 1
        return self.now


def test_sums_by_name_are_those_of_the_clock() -> None:
    clock = Clock()
    spans = Spans(clock)
    for duration in (1000, 2000):
        with spans("forward"):
            clock.now += duration
    with spans("data"):
        pass
    assert spans.pop_seconds() == pytest.approx({"forward": 3.002e-6, "data": 1e-9})
    assert spans.pop_seconds() == {}


def test_a_span_is_kept_with_its_step_and_its_times() -> None:
    spans = Spans(Clock())
    spans.step = 7
    with spans("wait"), spans("exchange"):
        pass
    spans.record("exchange", 1, EXCHANGE + 3, end_ns=2, step=6)
    assert spans.events() == [
        Event("exchange", 0, 3, 4, 7),
        Event("wait", 0, 2, 5, 7),
        Event("exchange", EXCHANGE + 3, 1, 2, 6),
    ]


def test_a_wait_for_activations_is_no_part_of_the_pass_around_it() -> None:
    clock, tensor = Clock(), torch.zeros(1)
    spans = Spans(clock)
    for name in ("forward", "backward", "evaluation"):
        with spans(name):
            clock.now += 1000
            with spans.waiting_for(tensor):
                clock.now += 500
    with spans.waiting_for(tensor):  # of a model that runs outside of a step
        clock.now += 500
    seconds = spans.pop_seconds()
    assert seconds == pytest.approx(
        {"forward": 1e-6, "backward": 1e-6, "activations": 1e-6, "evaluation": 1.5e-6}, rel=0.01
    )
    assert sum(event.end_ns - event.start_ns for event in spans.events() if event.name == "forward") > 1500


def test_memory_is_bounded_and_the_oldest_go() -> None:
    spans = Spans(capacity=5)
    for number in range(20):
        spans.step = number
        with spans("data"):
            pass
    assert [event.step for event in spans.events()] == [15, 16, 17, 18, 19]


def test_events_of_a_step_and_later() -> None:
    spans = Spans()
    for step in range(6):
        spans.step = step
        with spans("data"):
            pass
        if step:
            spans.record("late", 0, 1, 1, step - 1)  # what a device did in the step before
    found = [(event.name, event.step) for event in spans.events(4)]
    assert found == [("data", 4), ("data", 5), ("late", 4)]
    assert len(spans.events()) == 11


def test_another_thread_sees_where_the_training_thread_is() -> None:
    clock = Clock()
    spans = Spans(clock)
    seen: list[object] = []

    def look() -> None:
        seen.extend([[name for name, _ in spans.open()], spans.open()[0][1], spans.idle_s()])

    with spans("evaluation"), spans("forward"):
        clock.now += 5_000_000_000
        watcher = threading.Thread(target=look)
        watcher.start()
        watcher.join()
        spans.touch()  # progress within a long span
        assert spans.idle_s() < 1e-6
    assert seen == [["evaluation", "forward"], pytest.approx(5.0), pytest.approx(5.0)]
    assert spans.idle_s() < 1e-6


def test_long_collections_are_spans_and_count_in_no_sum() -> None:
    spans = Spans()
    with spans.collections():
        gc.collect(1)
        gc.collect(0)
    gc.collect(1)
    assert [event.name for event in spans.events()] == ["gc"]
    assert spans.pop_seconds() == {}


def test_listeners_are_called_in_order_and_their_sums_come_first() -> None:
    told: list[str] = []

    class Listener:
        def __init__(self, name: str) -> None:
            self.name = name

        def enter(self, name: str) -> None:
            told.append(f"{self.name}+{name}")

        def exit(self, name: str) -> None:
            told.append(f"{self.name}-{name}")

        def pop_seconds(self) -> dict[str, float]:
            return {"forward": 5.0} if self.name == "a" else {}

    spans = Spans(Clock())
    spans.listeners += [Listener("a"), Listener("b")]
    with spans("forward"):
        pass
    with spans("data"):
        pass
    assert told == ["a+forward", "b+forward", "b-forward", "a-forward", "a+data", "b+data", "b-data", "a-data"]
    seconds = spans.pop_seconds()
    assert seconds == {"forward": 5.0, "data": pytest.approx(1e-9)}


def test_an_error_ends_its_spans_and_what_a_listener_raises_then_does_not_replace_it() -> None:
    class Broken:
        def enter(self, name: str) -> None:
            pass

        def exit(self, name: str) -> None:
            raise RuntimeError("the device is gone")

        def pop_seconds(self) -> dict[str, float]:
            return {}

    spans = Spans()
    spans.listeners.append(Broken())
    with pytest.raises(ValueError, match="first"), spans("outer"), spans("inner"):
        raise ValueError("first")
    assert spans.open() == []
    assert [event.name for event in spans.events()] == ["inner", "outer"]
    with pytest.raises(RuntimeError, match="device is gone"), spans("forward"):
        pass
    assert spans.open() == []
