from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hvdtrain
from hvdtrain.observe import trackers
from hvdtrain.observe.past_journal import read_steps
from tests.support.journals import read_journal
from tests.support.toy import toy


class Client:
    made: list[Client] = []  # noqa: RUF012

    def __init__(self, folder: Path, config: Mapping[str, Any], variables: Mapping[str, str]) -> None:
        self.config, self.id = config, trackers._id_of("wandb", folder)
        self.logged: list[tuple[int, Mapping[str, float]]] = []
        self.failed: bool | None = None
        self.made.append(self)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.logged.append((step, dict(values)))

    def end(self, *, failed: bool) -> None:
        self.failed = failed


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _train(tracker: str, task: Callable[..., hvdtrain.Task] = toy, **train: Any) -> None:
    options = {"train": {"steps": 6, "global_batch": 4, "micro_batch": 2, **train}, "checkpoint": {"every": 3}}
    hvdtrain.train({**options, "observe": {"sinks": tracker}, "run_dir": "run"}, task)


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> list[Client]:
    monkeypatch.setattr(trackers, "TRACKERS", {"wandb": Client})
    monkeypatch.setattr("hvdtrain.training.records.observers.check_installed", lambda name: None)
    monkeypatch.setattr(Client, "made", [])
    return Client.made


def test_a_resume_continues_the_run(clients: list[Client]) -> None:
    _train("wandb", stop_at=3)
    _train("wandb")
    first, second = clients
    assert first.id == second.id and first.config["train"]["steps"] == 6
    assert (first.failed, second.failed) == (False, False)
    losses = {number: line["loss"] for number, line in read_steps(Path("run/journal.jsonl")).items()}
    logged = [each for client in clients for each in client.logged]
    points = {step: values["loss/train"] for step, values in logged if "loss/train" in values}
    assert points.keys() >= {1, 3, 6} and all(losses[step] == loss for step, loss in points.items())
    evaluations = [line for line in read_journal(Path("run/journal.jsonl")) if line.get("event") == "evaluation"]
    found = [(step, values["loss/heldout"]) for step, values in logged if "loss/heldout" in values]
    assert found == [(line["at_step"], line["loss"]) for line in evaluations]
    tags = {tag for _, values in second.logged for tag in values}
    assert tags >= {"heldout/positive", "memory_mib/parameters", "report/step_ms", "optimizer/learning_rate"}


def test_loads_of_experts_and_outer_steps_are_sent(clients: list[Client], tmp_path: Path) -> None:
    tracker = trackers.Tracker("wandb", tmp_path, {})
    tracker.write({"event": "started", "unit": "samples", "config": {}, "time": 0.0})
    layer = {"tokens": 8, "busiest": 1.5, "entropy": 0.9}
    tracker.write({"event": "experts", "at_step": 10, "layers": {"layers.1": layer}})
    tracker.write({"event": "outer_step", "at_step": 12, "cosines": [0.5, 0.7], "drift": 0.1, "wait_s": 2.0})
    assert clients[0].logged[0] == (10, {"experts/busiest/layers.1": 1.5, "experts/entropy/layers.1": 0.9})
    assert clients[0].logged[1][0] == 12 and any(tag.startswith("outer/") for tag in clients[0].logged[1][1])


def test_a_failed_run_is_marked(clients: list[Client]) -> None:
    def loss(model: Any, batch: Any) -> Any:
        raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        _train("wandb", lambda: replace(toy(), loss=loss, heldout_data=None))
    assert clients[0].failed


def test_a_tracker_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(hvdtrain.HvdtrainError, match="pip install mlflow-skinny"):
        _train("mlflow")


@pytest.mark.parametrize("name", ["mlflow", "wandb", "trackio"])
def test_those_that_are_installed_take_the_numbers(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for variable, value in (("WANDB_MODE", "offline"), ("TRACKIO_DIR", "trackio"), ("MLFLOW_ALLOW_FILE_STORE", "true")):
        monkeypatch.setenv(variable, value)  # trackio reads its own when it is imported
    tracker = pytest.importorskip(name, reason=f"{name} is not installed")
    if name == "mlflow":
        tracker.set_tracking_uri(f"file:{tmp_path / 'mlruns'}")
    _train(name, stop_at=3)
    _train(name)
    assert "the metric sink" not in capfd.readouterr().out
    if name != "mlflow":
        assert list(Path("run/wandb" if name == "wandb" else "trackio").rglob("*"))
        return
    (run,) = tracker.search_runs(experiment_names=["hvdtrain"], output_format="list")
    assert run.info.status == "FINISHED" and run.data.params["train.global_batch"] == "4"
    assert run.data.metrics["loss/train"] == pytest.approx(read_steps(Path("run/journal.jsonl"))[6]["loss"])
    points = tracker.MlflowClient().get_metric_history(run.info.run_id, "loss/heldout")
    assert [point.step for point in points] == [0, 3, 6]
