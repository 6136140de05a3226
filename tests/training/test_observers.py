"""What the options ask to be recorded, on real runs of a task of milliseconds; and the link between ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

import hvdtrain
from hvdtrain.config.schema import Config
from hvdtrain.errors import ConfigError
from hvdtrain.observe.output import Progress
from hvdtrain.observe.sinks import Recorder
from hvdtrain.plan.plan import Plan
from hvdtrain.run_layout import RunLayout
from hvdtrain.spans import Spans
from hvdtrain.training.records import observers
from hvdtrain.training.round import Round
from tests.support.journals import read_journal
from tests.support.thread_comm import ThreadComm, on_ranks
from tests.support.toy import toy
from tests.support.trace_format import check_trace

OPTIONS = {"train": {"steps": 6, "global_batch": 8, "micro_batch": 4}, "checkpoint": {"every": 3}}


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


@pytest.mark.filterwarnings("ignore:Profiler clears events")
@pytest.mark.parametrize(("window", "name"), [("2:3", "2-3"), ("5:900", "5-6")], ids=["within", "cut short"])
def test_torch_profiler_by_window(window: str, name: str, tmp_path: Path) -> None:
    _train(tmp_path, profile=window)
    profile = json.loads((tmp_path / "timeline" / f"torch-steps-{name}-rank-0.json").read_text())
    names = [event["name"] for event in profile["traceEvents"] if event.get("ph") == "X"]
    assert names.count("optimizer") == 2
    assert names.count("forward") == 4
    assert any(name.startswith("aten::") for name in names)


@pytest.mark.parametrize("option", ["timeline", "profile"])
def test_a_window_that_is_never_reached_is_reported(tmp_path: Path, option: str) -> None:
    lines = _train(tmp_path, **{option: "7:9"})
    (text,) = [line["text"] for line in lines if line.get("event") == "warning"]
    assert f"--observe.{option} begins at step 7" in text


def test_sinks_get_the_records_of_the_journal_and_one_that_fails_fails_no_run(tmp_path: Path) -> None:
    taken: list[Mapping[str, Any]] = []

    def fail(record: Mapping[str, Any]) -> None:
        raise RuntimeError("no network")

    lines = _train(tmp_path, [taken.append, fail])
    warnings = [line["text"] for line in lines if line.get("event") == "warning"]  # of the other sink
    records = [line for line in lines if line.get("event") != "warning"]
    assert [json.loads(json.dumps(record)) for record in taken if record.get("event") != "warning"] == records
    assert [line["step"] for line in lines if "event" not in line] == list(range(1, 7))
    assert {"started", "evaluation", "checkpoint", "finished"} <= {record.get("event") for record in taken}
    assert "sink fail failed: RuntimeError: no network" in warnings[0]
    again = _train(tmp_path)[len(lines) :]
    assert [line for line in again if line.get("event") == "warning"] == [], "of a finished run that is started again"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"sinks": ["nothing"]}, "nothing"),
        ({"sinks": ["missing.py:Tracker"]}, "missing.py"),
        ({"sinks": ["json:no_such"]}, "no_such"),
        ({"nvtx": True}, "no CUDA device"),
    ],
)
def test_what_is_not_there_is_refused(tmp_path: Path, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        _train(tmp_path, **options)


Links = dict[tuple[str, ...], list[tuple[int, float]]]


def _meet(folder: Path, known: list[Links], started_at: int = 0) -> list[object]:
    """A round of as many ranks as there is knowledge; the link that rank 0 left of it."""

    def body(comm: ThreadComm) -> None:
        recorder = Recorder(None, Progress("samples", 60.0, live=False, quiet=True))
        state = SimpleNamespace(model=nn.Linear(1, 1), progress=SimpleNamespace(step=started_at))
        worker = SimpleNamespace(device=torch.device("cpu"), state=state, links=known[comm.rank], compiled=0)
        worker.plan = Plan()
        current = SimpleNamespace(comm=comm, worker=worker, recorder=recorder, layout=RunLayout(folder), stop=100)
        current.run, current.spans = SimpleNamespace(config=Config()), Spans()
        observers.add_stamps(cast(Round, current))
        recorder.close()

    on_ranks(len(known), body)
    lines = [json.loads(line) for line in (folder / "timeline" / "steps.jsonl").read_text().splitlines()]
    link: list[object] = [line for line in lines if "link" in line][-1]["link"]
    return link


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    measure = observers.probe_link

    def probe(comm: ThreadComm, device: torch.device, budget_s: float) -> list[tuple[int, float]]:
        found.append(comm.rank)
        return measure(comm, device, budget_s)

    monkeypatch.setattr(observers, "probe_link", probe)
    return found


def test_a_new_rank_gets_the_link_measured_by_rank_0(tmp_path: Path, probes: list[int]) -> None:
    """Another number of ranks is another link. A rank 0 that knows nothing measures with all."""
    survivor, newcomer = Links(), Links()
    first = _meet(tmp_path, [survivor, {}])
    assert sorted(probes) == [0, 1] and len(first) >= 2
    assert _meet(tmp_path, [survivor]) == []
    assert _meet(tmp_path, [survivor, newcomer], started_at=3) == first
    assert sorted(probes) == [0, 1]
    assert [[list(part) for part in link] for link in newcomer.values()] == [first]
    probes.clear()
    _meet(tmp_path, [survivor, {}, {}], started_at=6)
    assert sorted(probes) == [0, 1, 2]
    probes.clear()
    _meet(tmp_path, [{}, survivor], started_at=9)
    assert sorted(probes) == [0, 1]
