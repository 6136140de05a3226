"""What the options ask to be recorded, on real runs of a task of milliseconds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import hvdtrain
from hvdtrain.comm.solo import SoloComm
from hvdtrain.config.windows import Window
from hvdtrain.errors import ConfigError
from hvdtrain.observe.past_journal import read_journal
from hvdtrain.observe.recorder import Recorder
from hvdtrain.run_layout import RunLayout
from hvdtrain.runtime.timeline import TimelinePlan
from hvdtrain.training.loop.buffers import Rollback
from hvdtrain.training.records import observers
from tests.support.toy import toy
from tests.support.trace_format import check_trace

OPTIONS = {"train": {"steps": 6, "global_batch": 8}, "checkpoint": {"every": 3}}


def _train(run: Path, given: list[Any] | None = None, **observe: Any) -> list[dict[str, Any]]:
    hvdtrain.train({**OPTIONS, "run_dir": str(run), "observe": observe}, toy, sinks=given or [])
    return read_journal(run / "journal.jsonl")


def _trace(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text())
    check_trace(events)
    return [event for event in events if event["ph"] == "X"]


def test_a_trace_has_every_part_of_every_step(tmp_path: Path) -> None:
    _train(tmp_path)
    spans = _trace(tmp_path / "timeline" / "spans-rank-0.json")
    parts = {"step", "data", "copy", "forward", "backward", "wait", "clip", "optimizer"}
    for step in range(1, 7):
        assert parts <= {span["name"] for span in spans if span["args"]["step"] == step}
    for name, count in {"checkpoint": 2, "evaluation": 3, "step": 6, "forward": 12}.items():
        assert len([span for span in spans if span["name"] == name]) == count
    whole = {s["args"]["step"]: s["dur"] for s in spans if s["name"] == "step"}
    for step, duration in whole.items():
        inside = [s["dur"] for s in spans if s["args"]["step"] == step and s["name"] in parts - {"step"}]
        assert 0 < sum(inside) <= duration


def test_off_means_no_trace(tmp_path: Path) -> None:
    _train(tmp_path, timeline="off")
    assert not (tmp_path / "timeline").exists()


@pytest.mark.filterwarnings("ignore:Profiler clears events")
def test_torch_profiler_by_window(tmp_path: Path) -> None:
    _train(tmp_path, profile="2:3")
    profile = json.loads((tmp_path / "timeline" / "torch-steps-2-3-rank-0.json").read_text())
    names = [event["name"] for event in profile["traceEvents"] if event.get("ph") == "X"]
    assert names.count("optimizer") == 2
    assert names.count("forward") == 4
    assert any(name.startswith("aten::") for name in names)


def test_a_profile_that_the_end_cuts_short_is_written(tmp_path: Path) -> None:
    _train(tmp_path, profile="5:900")
    assert (tmp_path / "timeline" / "torch-steps-5-6-rank-0.json").exists()


@pytest.mark.parametrize("option", ["timeline", "profile"])
def test_a_window_that_is_never_reached_is_reported(tmp_path: Path, option: str) -> None:
    lines = _train(tmp_path, **{option: "7:9"})
    warnings = [line["text"] for line in lines if line.get("event") == "warning"]
    assert warnings == [f"--observe.{option} begins at step 7, but the run ends at step 6"]


def test_a_finished_run_that_is_started_again_has_no_warning(tmp_path: Path) -> None:
    _train(tmp_path)
    assert [line for line in _train(tmp_path) if line.get("event") == "warning"] == []


def test_sinks_get_the_records_of_the_journal(tmp_path: Path) -> None:
    taken: list[Mapping[str, Any]] = []
    lines = _train(tmp_path, [taken.append])
    assert [json.loads(json.dumps(record)) for record in taken] == lines
    assert {"started", "evaluation", "checkpoint", "finished"} <= {record.get("event") for record in taken}


def test_a_failing_sink_fails_no_run(tmp_path: Path) -> None:
    def fail(record: Mapping[str, Any]) -> None:
        raise RuntimeError("no network")

    lines = _train(tmp_path, [fail])
    assert [line["step"] for line in lines if "event" not in line] == list(range(1, 7))
    warnings = [line["text"] for line in lines if line.get("event") == "warning"]
    assert "the metric sink fail failed: RuntimeError: no network" in warnings


def test_sinks_by_name(tmp_path: Path) -> None:
    file = tmp_path / "tracker.py"
    file.write_text(
        "import json, pathlib\n"
        "class Tracker:\n"
        "    def __init__(self): self.lines = []\n"
        "    def write(self, record): self.lines.append(record)\n"
        "    def close(self): pathlib.Path(__file__).with_suffix('.json').write_text(json.dumps(self.lines))\n"
    )
    lines = _train(tmp_path / "run", sinks=[f"{file}:Tracker"])
    assert json.loads((tmp_path / "tracker.json").read_text()) == lines


@pytest.mark.parametrize("spec", ["nothing", "missing.py:Tracker", "json:no_such"])
def test_a_sink_that_is_not_there(tmp_path: Path, spec: str) -> None:
    with pytest.raises(ConfigError):
        _train(tmp_path, sinks=[spec])


def test_nvtx_without_cuda_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no CUDA device"):
        _train(tmp_path, nvtx=True)


class HorovodsTimeline(SoloComm):
    """One rank that can record."""

    started_threads = frozenset({1, 2})

    def start_timeline(self, path: Path) -> None:
        raise AssertionError

    def stop_timeline(self) -> None:
        raise AssertionError


class Watchers(list[Any]):
    """The one thing that is asked of a recorder here."""

    add_watcher = list.append
    warn = say = pytest.fail


def test_later_errors_do_not_replace_a_device_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Faulty(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("CUDA error: device-side assert triggered")

    def later(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: what cleans up fails too")

    task = toy(heldout=0)
    task.model.layers.append(Faulty())
    monkeypatch.setattr(Rollback, "end", later)
    monkeypatch.setattr(Recorder, "close_watchers", later)
    with pytest.raises(RuntimeError):
        hvdtrain.train({**OPTIONS, "run_dir": str(tmp_path)}, task)
    card = json.loads((tmp_path / "failure.json").read_text())
    assert "device-side assert" in card["statements"][0]["fault"]["message"]
    (failed,) = [line for line in read_journal(tmp_path / "journal.jsonl") if line.get("event") == "failed"]
    assert "device-side assert" in failed["message"]


@pytest.mark.parametrize("quiet", [True, False])
def test_a_thread_that_sleeps_is_not_looked_for(quiet: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[frozenset[int]] = []
    monkeypatch.setattr(observers, "find_spinning_thread", looked.append)
    watchers = Watchers()
    plan = TimelinePlan("window", Window(2, 3), quiet=quiet)
    observers.add_horovod_timeline(watchers, plan, RunLayout(tmp_path), HorovodsTimeline())  # type: ignore[arg-type]
    assert looked == ([] if quiet else [frozenset({1, 2})])
    assert len(watchers) == 1
