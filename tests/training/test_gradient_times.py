"""The times that `timeline whatif` replays: when gradients are ready and packed, recorded for a few steps only."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from hvdtrain.comm.solo import SoloComm
from hvdtrain.compression.table import parse
from hvdtrain.engine.exchange import ExchangeEngine
from hvdtrain.exchange.reducer import Reducer
from hvdtrain.runtime.host import read_host
from hvdtrain.spans import Spans
from hvdtrain.training.records.gradient_times import GradientMarks, GradientTimes


def _run(path: Path, steps: int, warn: Any = None) -> tuple[nn.Module, Spans]:
    """Steps of a model with an embedding whose rows are hardly touched, and a parameter that backward leaves out."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"embed": nn.Embedding(512, 512), "out": nn.Linear(512, 1), "idle": nn.Linear(2, 2)})
    ticks = count(0, 1000)
    spans = Spans(lambda: next(ticks))
    comm = SoloComm()
    ready = GradientMarks(model, spans)
    named = [(name, p) for name, p in model.named_parameters()]
    reducer = Reducer(lambda: named, comm, parse("none"), spans=spans)
    engine = ExchangeEngine(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), reducer)
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


def test_the_last_pass_of_some_early_steps_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "timeline" / "gradients.json"
    model, spans = _run(path, steps=12)
    found = json.loads(path.read_text())
    assert [step["step"] for step in found["steps"]] == [4, 5, 6, 7]
    names = [p["name"] for p in found["parameters"]]
    assert names == [name for name, _ in model.named_parameters()]
    for step in found["steps"]:
        assert step["passes"] == 2
        ready, packed = (dict(zip(names, step[key], strict=True)) for key in ("ready_us", "packed_us"))
        assert ready["idle.weight"] is packed["idle.weight"] is None
        assert 0 < ready["out.weight"] < packed["out.weight"] < ready["embed.weight"] < packed["embed.weight"]
        assert packed["embed.weight"] < step["backward_us"]
    rows = {p["name"]: p["rows"] for p in found["parameters"]}
    assert rows == {"embed.weight": 2, "out.weight": None, "out.bias": None, "idle.weight": None, "idle.bias": None}
    assert found["plan"]["rows"] == {"embed.weight": 2}
    assert found["version"] == 1
    assert (found["by_element"], found["frozen_bytes"]) == (True, 0)
    assert [p["state_bytes"] for p in found["parameters"]] == [[4, 0]] * len(names), "momentum, in fp32"
    assert spans.listeners == []
    assert all(len(p._post_accumulate_grad_hooks) == 1 for p in model.parameters())  # type: ignore[attr-defined]


def test_a_run_that_ends_earlier_writes_the_times_it_has(tmp_path: Path) -> None:
    _run(tmp_path / "short.json", steps=3)
    assert not (tmp_path / "short.json").exists()
    _run(tmp_path / "some.json", steps=6)
    assert [step["step"] for step in json.loads((tmp_path / "some.json").read_text())["steps"]] == [4, 5]


def test_a_failed_write_during_a_failure_is_reported_and_not_raised(tmp_path: Path) -> None:
    said: list[str] = []
    model, spans = nn.Linear(2, 2), Spans()
    engine: Any = SimpleNamespace(compression="none", copies=dict)  # one that cannot tell its plan any more
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
