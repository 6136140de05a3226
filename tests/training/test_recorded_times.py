"""Times of a step: durations by a device's own clock, and when gradients are ready and packed."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hvdtrain.comm.solo import SoloComm
from hvdtrain.compression.table import parse
from hvdtrain.engine.base import Engine
from hvdtrain.engine.in_all_copies import InAllCopies
from hvdtrain.exchange.bucket import Bucket
from hvdtrain.exchange.reducer import Reducer
from hvdtrain.runtime.host import read_host
from hvdtrain.spans import DEVICE, Spans
from hvdtrain.training.records.gradient_times import GradientMarks, GradientTimes
from hvdtrain.training.records.listeners import DeviceSpans


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


def _run(
    path: Path, steps: int, warn: Any = None, packing: pytest.MonkeyPatch | None = None
) -> tuple[nn.Module, Spans]:
    """Steps of a model with an embedding whose rows are hardly touched, and a parameter that backward leaves out.

    With `packing`, packing a gradient takes 100 us.
    """
    torch.manual_seed(0)
    model = nn.ModuleDict({"embed": nn.Embedding(512, 512), "out": nn.Linear(512, 1), "idle": nn.Linear(2, 2)})
    ticks = count(0, 1000)
    spans = Spans(lambda: next(ticks))
    comm = SoloComm()
    if packing is not None:
        pack = Bucket.pack
        packing.setattr(Bucket, "pack", lambda *args: (pack(*args), [next(ticks) for _ in range(100)])[0])
    ready = GradientMarks(model, spans)
    named = [(name, p) for name, p in model.named_parameters()]
    reducer = Reducer(lambda: named, comm, parse("none"), spans=spans)
    engine = Engine(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), InAllCopies(reducer))
    times = GradientTimes(ready, engine, comm, spans, path, warn or (lambda text: None), read_host({}))
    for step in range(1, steps + 1):
        times.begin_step(step)
        spans.step = step
        engine.begin(2)
        for _ in range(2):
            loss = model["out"](model["embed"](torch.tensor([3, 5]))).sum()
            with spans("backward"):
                engine.backward(loss)
        engine.finish()
        engine.step()
    times.close()
    return model, spans


def test_the_last_pass_of_some_early_steps_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "timeline" / "gradients.json"
    model, spans = _run(path, steps=12, packing=monkeypatch)
    found = json.loads(path.read_text())
    assert [step["step"] for step in found["steps"]] == [4, 5, 6, 7]
    names = [p["name"] for p in found["parameters"]]
    assert names == [name for name, _ in model.named_parameters()]
    for step in found["steps"]:
        assert step["passes"] == 2
        ready, packed = (dict(zip(names, step[key], strict=True)) for key in ("ready_us", "packed_us"))
        assert ready["idle.weight"] is packed["idle.weight"] is None
        assert 0 < ready["out.weight"] < packed["out.weight"] < ready["embed.weight"] < packed["embed.weight"]
        assert packed["out.weight"] - ready["out.weight"] >= 100, "packing lies between the marks"
        assert packed["embed.weight"] < step["backward_us"]
    rows = {p["name"]: p["rows"] for p in found["parameters"]}
    assert rows == {"embed.weight": 2, "out.weight": None, "out.bias": None, "idle.weight": None, "idle.bias": None}
    assert found["plan"]["rows"] == {"embed.weight": 2}
    assert found["version"] == 1
    assert (found["by_element"], found["frozen_bytes"]) == (True, 0)
    assert [p["state_bytes"] for p in found["parameters"]] == [[4, 0]] * len(names), "momentum, in fp32"
    assert spans.listeners == []
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())  # type: ignore[attr-defined]


def test_a_run_that_ends_earlier_writes_the_times_it_has(tmp_path: Path) -> None:
    _run(tmp_path / "short.json", steps=3)
    assert not (tmp_path / "short.json").exists()
    _run(tmp_path / "some.json", steps=6)
    assert [step["step"] for step in json.loads((tmp_path / "some.json").read_text())["steps"]] == [4, 5]


def test_a_failed_write_during_a_failure_is_reported_and_not_raised(tmp_path: Path) -> None:
    said: list[str] = []
    model, spans = nn.Linear(2, 2), Spans()
    engine: Any = SimpleNamespace(
        compression="none", sums=SimpleNamespace(copies=dict)
    )  # one that cannot tell its plan any more
    ready, file = GradientMarks(model, spans), tmp_path / "gradients.json"
    times = GradientTimes(ready, engine, SoloComm(), spans, file, said.append, read_host({}))
    for step in range(1, 6):
        times.begin_step(step)
        spans.step = step
        with spans("backward"):
            model(torch.ones(1, 2)).sum().backward()
    times.close()
    assert len(said) == 1
    assert spans.listeners == []


def test_a_folder_that_cannot_be_written_costs_the_file_not_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said: list[str] = []
    _run(tmp_path / "file" / "gradients.json", steps=9, warn=said.append)
    assert len(said) == 1 and str(tmp_path / "file") in said[0]
