"""Durations on a device are those of its own clock, set by the host's, and known when it has got there."""

from __future__ import annotations

import pytest

from hvdtrain.spans import DEVICE, Spans
from hvdtrain.training.records.device_spans import DeviceSpans


class Device:
    """A device whose queue is worked off when told: events happen at its own time, in milliseconds."""

    def __init__(self) -> None:
        self.now_ms = self.done_ms = self.host_ms = 0.0
        self.made = 0
        self.spans = Spans(lambda: 1000 + round(self.host_ms * 1e6))
        self.spans.listeners.append(DeviceSpans(self.spans, self.event))

    def event(self) -> FakeEvent:
        self.made += 1
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.at_ms = float("nan")

    def record(self) -> None:
        self.at_ms = self.device.now_ms

    def synchronize(self) -> None:
        self.device.done_ms = max(self.device.done_ms, self.at_ms)

    def query(self) -> bool:
        return self.at_ms <= self.device.done_ms

    def elapsed_time(self, later: FakeEvent) -> float:
        assert self.query() and later.query(), "read before it happened: that would be a wait"
        return later.at_ms - self.at_ms


def test_durations_are_the_devices_and_come_when_they_are_known() -> None:
    """They are in the trace on the device's track, in their step. What the host does is timed by the host."""
    device = Device()
    spans = device.spans
    spans.step = 1
    with spans("data"):
        device.host_ms = 3.0
    for name, duration_ms in (("forward", 10), ("backward", 20), ("wait", 5), ("optimizer", 3)):
        with spans(name):
            device.now_ms += duration_ms
    spans.step = 2
    device.done_ms = device.host_ms = 35.0  # the optimizer is still under way
    expected = {"data": 0.003, "forward": 0.010, "backward": 0.020, "wait": 0.005, "optimizer": 0.0}
    found = spans.pop_seconds()
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    on_device = [event for event in spans.events() if event.track == DEVICE]
    assert [(event.name, event.step) for event in on_device] == [("forward", 1), ("backward", 1), ("wait", 1)]
    assert [event.end_ns - event.start_ns for event in on_device] == [10_000_000, 20_000_000, 5_000_000]
    device.done_ms = device.host_ms = 38.0
    assert spans.pop_seconds()["optimizer"] == pytest.approx(0.003)


@pytest.mark.parametrize("rate", [0.999, 1.001], ids=["slow", "fast"])
def test_a_drifting_device_clock_follows_the_hosts(rate: float) -> None:
    """And events are used again."""
    device = Device()
    spans = device.spans
    for step in range(1, 401):
        spans.step = step
        device.host_ms += 1  # nothing to do for it
        device.now_ms += 1 * rate
        begun = device.host_ms
        for name in ("forward", "backward"):
            with spans(name):
                device.host_ms += 5
                device.now_ms += 5 * rate
        device.done_ms = device.now_ms
        spans.pop_seconds()
        forward, backward = [event for event in spans.events(step) if event.track == DEVICE]
        assert forward.end_ns <= backward.start_ns
        assert forward.start_ns == pytest.approx(1000 + begun * 1e6, abs=0.1e6)  # it would be 4 ms at the end
    assert device.made <= 5


@pytest.mark.parametrize("rate", [0.999, 1.001], ids=["slow", "fast"])
def test_the_clock_of_a_device_that_is_never_idle_is_set_where_the_host_waits(rate: float) -> None:
    device = Device()
    spans = device.spans
    assert spans.on_synchronized is not None
    for step in range(1, 401):
        spans.step = step
        for name, ms in (("forward", 5), ("optimizer", 4)):
            with spans(name):  # launched while the device still works on the step before
                device.now_ms += ms * rate
            if name == "forward":
                copied = device.event()
                copied.record()
                true_ms = (step - 1) * 9 + 5.0
        device.host_ms = true_ms + 0.02
        device.done_ms = copied.at_ms
        spans.on_synchronized(copied, True)
        device.host_ms += 3.0  # while the device updates the parameters
        spans.pop_seconds()
    (forward,) = [event for event in spans.events(400) if event.track == DEVICE and event.name == "forward"]
    assert forward.end_ns == pytest.approx(1000 + true_ms * 1e6, abs=0.1e6 + 0.01e6)  # it would be 3.6 ms off
