"""`--parallel.compression auto` measures, decides alike on all ranks, says so, and keeps to it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hvdtrain.compression.table import auto_candidates
from hvdtrain.engine.in_all_copies import InAllCopies
from hvdtrain.engine.make import make_engine
from hvdtrain.exchange.reducer import Reducer
from hvdtrain.plan.plan import Plan
from hvdtrain.runtime.host import HostFacts
from hvdtrain.training.start import auto_compression
from hvdtrain.training.start.auto_compression import CompressionTrial
from tests.support.journals import read_events
from tests.support.thread_comm import ThreadComm, on_ranks
from tests.support.thread_job import train_on_threads

CPU = torch.device("cpu")


def _run(comm: ThreadComm, exposed_s: float, steps: int = 10) -> tuple[str, list[dict[str, Any]], list[str]]:
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    engine = make_engine(torch.optim.SGD(model.parameters(), lr=0.1), model, comm, Plan(compression="auto"))
    assert isinstance(engine.sums, InAllCopies) and engine.sums.undecided and engine.compression == "none"
    events: list[dict[str, Any]] = []
    lines: list[str] = []
    trial = CompressionTrial(
        engine.sums, comm, CPU, HostFacts(cores=8, own_cores=8), (2, 1), events.append, lines.append
    )
    for step in range(steps):
        engine.begin(1)
        engine.backward(model(torch.ones(2, 8)).sum())
        gradients = engine.finish()
        assert all(bool(torch.isfinite(g).all()) for g in gradients)
        engine.step()
        engine.commit(applied=True)
        # Ranks see unlike times: they must choose alike.
        waited_s = exposed_s * (1 + comm.rank)
        parts = dict.fromkeys(("data_s", "copy_s", "forward_s", "clip_s", "optimizer_s"), 0.0)
        times = {"backward_s": 0.01, "exposed_comm_s": waited_s, "step_s": 0.5 + 0.01 * comm.rank}
        trial.add_step({"step": step + 1, **parts, **times})
    assert not engine.sums.undecided
    return engine.compression, events, lines


@pytest.mark.parametrize("exposed_s", [0.0, 0.3])
def test_it_stays_with_none_where_nothing_waits_for_the_link(exposed_s: float) -> None:
    """A wait that the probed link does not explain is one for late ranks."""
    for chosen, events, lines in on_ranks(2, lambda comm: _run(comm, exposed_s)):
        assert chosen == "none"
        assert [e["event"] for e in events] == ["compression_chosen"]
        assert "none is worth its cost" in lines[0]
        assert events[0]["predicted_step_s"].keys() == {"none", *auto_candidates()}


def test_it_chooses_the_compression_that_pays_on_a_slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a simulated link of 10 kB/s and free coding; everything else is real."""
    measure = auto_compression.measure_coding
    monkeypatch.setattr(auto_compression, "measure_coding", lambda *given: [c.scaled(0.0) for c in measure(*given)])
    slow = [(4, 1e-4), (1 << 12, 0.4), (1 << 14, 1.6)]
    monkeypatch.setattr(auto_compression, "probe_link", lambda comm, device, budget_s: slow)
    results = on_ranks(2, lambda comm: _run(comm, 0.3))
    (chosen,) = {chosen for chosen, _, _ in results}
    assert chosen in ("int8", "powersgd:4") and f"{chosen} from now on" in results[0][2][0]


def test_buckets_that_change_meanwhile_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: dict[int, int] = {}

    def start_times_ns(reducer: Reducer) -> list[int]:
        measured[id(reducer)] = measured.get(id(reducer), 0) + 1
        return [1, 2] if measured[id(reducer)] <= 2 else [1]

    monkeypatch.setattr(Reducer, "start_times_ns", start_times_ns)
    (_, events, lines), _ = on_ranks(2, lambda comm: _run(comm, 0.0))
    assert events[0]["at_step"] == 9, "five steps from step 5 on"
    assert "failed" not in lines[0]


def test_a_prediction_that_fails_chooses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object) -> None:
        raise ZeroDivisionError("of a test")

    monkeypatch.setattr(auto_compression, "choose_compression", fail)
    for chosen, events, lines in on_ranks(2, lambda comm: _run(comm, 0.3)):
        assert chosen == "none" and events[0]["compression"] == "none"
        assert lines == ["compression: none: the prediction failed: ZeroDivisionError: of a test"]


def test_a_resume_keeps_the_choice() -> None:
    """Options win."""

    def resumed(comm: ThreadComm, option: str, saved: str | None) -> tuple[str, bool]:
        model = nn.Linear(2, 1)
        engine = make_engine(torch.optim.SGD(model.parameters(), lr=0.1), model, comm, Plan(compression=option))
        engine.load_state_dict({}, {"plan": None, "ranks": 2, "compression": saved})
        return engine.compression, engine.sums.undecided

    for option, saved, expected in (
        ("auto", "fp16", ("fp16", False)),
        ("auto", None, ("none", True)),
        ("none", "fp16", ("none", False)),
    ):
        assert on_ranks(2, partial(resumed, option=option, saved=saved)) == [expected] * 2


def test_a_job_prints_its_choice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--parallel.compression=auto", "--train.steps=12", f"--run_dir={tmp_path}")
    train_on_threads(f"--task={Path(__file__).parents[1]}/support/toy.py:toy", *options, size=2)
    assert "compression: " in capsys.readouterr().out
    (event,) = read_events(tmp_path, "compression_chosen")
    assert event["at_step"] == 7
    assert event["bytes_per_s"] > 0 and event["latency_s"] > 0
