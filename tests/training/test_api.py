"""`hvdtrain.train` from Python: configs of every kind, tasks of every kind, a task with an optimizer of its own."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hvdtrain
from hvdtrain.config.schema import CheckpointConfig, TrainConfig
from hvdtrain.observe.past_journal import read_steps
from tests.support.journals import read_events, read_losses
from tests.support.launch import run
from tests.support.tensorboard_run import series
from tests.support.toy import toy

ROOT = Path(__file__).parents[2]
OPTIONS = {"train": {"steps": 5, "global_batch": 4, "micro_batch": 2}, "checkpoint": {"every": 0}}
pytestmark = pytest.mark.usefixtures("own_folder")


def test_configs_of_every_kind_mean_the_same() -> None:
    Path("run.yaml").write_text("train: {steps: 5, global_batch: 4, micro_batch: 2}\ncheckpoint: {every: 0}\n")
    typed = hvdtrain.Config(
        train=TrainConfig(steps=5, global_batch=4, micro_batch=2), checkpoint=CheckpointConfig(every=0)
    )
    results = [hvdtrain.train(config, toy) for config in (OPTIONS, typed, "run.yaml", Path("run.yaml"))]
    assert len({result.run_dir for result in results}) == 4
    losses = [read_losses(result.run_dir) for result in results]
    assert losses == losses[:1] * 4
    with pytest.raises(hvdtrain.HvdtrainError, match="config is of the wrong type"):
        hvdtrain.train(3, toy)  # type: ignore[arg-type]


def _wanders(elsewhere: Path, **changes: Any) -> Callable[[], hvdtrain.Task]:
    def build() -> hvdtrain.Task:
        elsewhere.mkdir(exist_ok=True)
        os.chdir(elsewhere)
        return replace(toy(), **changes)

    return build


@pytest.mark.parametrize("given", [{"run_dir": "run"}, {"run_dir": "../start/run"}, {}], ids=["named", "above", "new"])
def test_a_task_that_changes_to_another_folder_moves_nothing(
    given: dict[str, str], own_folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    start, elsewhere = own_folder / "start", own_folder / "elsewhere"
    start.mkdir()
    monkeypatch.chdir(start)
    monkeypatch.setenv("HOROVOD_TIMELINE", "mine.json")
    Path("tracker.py").write_text("seen = []\n\n\ndef track(record):\n    seen.append(record)\n")
    options = {**OPTIONS, **given, "checkpoint": {"every": 2}, "observe": {"sinks": ["tracker.py:track"]}}
    result = hvdtrain.train(options, _wanders(elsewhere))
    assert result.run_dir.is_absolute() and result.run_dir.parent.resolve().is_relative_to(start)
    assert len(read_losses(result.run_dir)) == 5
    assert read_events(result.run_dir, "started")[0]["horovod_timeline"] == str(start / "mine.json")
    os.chdir(start)
    more = {"run_dir": "other", "resume": os.path.relpath(result.run_dir), "train": {"steps": 7}}
    other = hvdtrain.train({**options, **more}, _wanders(elsewhere))
    assert (other.resumed_at, other.run_dir) == (5, start / "other")
    assert not list(elsewhere.iterdir())
    assert "failed" not in capfd.readouterr().out


def test_the_card_of_such_a_task_names_the_run_as_it_is_typed(own_folder: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        hvdtrain.train({**OPTIONS, "run_dir": "run"}, _wanders(own_folder / "elsewhere", loss=lambda *given: 1 // 0))
    card = json.loads((own_folder / "run" / "failure.json").read_text())
    assert card["run_dir"] == "run" and card["resume"].endswith("run_dir set to run")
    assert not list((own_folder / "elsewhere").iterdir())


def test_the_result_tells_how_it_went() -> None:
    result = hvdtrain.train(OPTIONS, toy)
    losses = read_losses(result.run_dir)
    assert (result.reason, result.step, result.total_steps, result.resumed_at) == ("finished", 5, 5, 0)
    assert result.first_loss == losses[0]
    assert result.last_loss == pytest.approx(sum(losses) / 5)
    assert 0 < result.last_heldout_loss < result.first_heldout_loss
    assert result.metrics == read_events(result.run_dir, "evaluation")[-1]["metrics"]
    assert result.metrics.keys() == {"positive"} and result.unit == "samples"
    assert result.tokens_per_s > 0
    assert sum(result.budget.values()) > result.seconds > 0
    assert isinstance(result.model, torch.nn.Module)


def test_parameters_of_a_function_come_from_the_config_or_a_partial() -> None:
    for more, task in (({"hidden": 3}, toy), ({}, functools.partial(toy, hidden=3))):
        assert hvdtrain.train({**OPTIONS, **more}, task).model.layers[0].out_features == 3
    with pytest.raises(hvdtrain.HvdtrainError, match="did you mean --hidden"):
        hvdtrain.train({**OPTIONS, "hiden": 3}, toy)


def test_a_task_brings_its_optimizer_and_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    task = toy(dropout=0.0)
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.5)
    result = hvdtrain.train(OPTIONS, replace(task, optimizer=optimizer, schedule=lambda step: 0.5**step))
    rates = [line["lr"] for line in read_steps(result.run_dir / "journal.jsonl").values()]
    assert rates == [0.5, 0.25, 0.125, 0.0625, 0.03125]
    assert "--optimizer.* is ignored" in capsys.readouterr().out


@pytest.mark.parametrize("number", [np.float64, np.float32, np.int64, torch.tensor], ids=lambda kind: kind.__name__)
def test_numbers_of_a_task_may_be_numpys_or_tensors(number: Callable[[float], Any]) -> None:
    def task(kind: Callable[[float], Any]) -> hvdtrain.Task:
        torch.manual_seed(0)
        base = toy(dropout=0.0)
        return replace(
            base,
            loss=lambda model, batch: (base.loss(model, batch)[0], kind(float(len(batch[0])))),
            optimizer=torch.optim.SGD(base.model.parameters(), lr=1e-3),
            schedule=lambda step: kind(1.0 * (step + 1)),
            metrics=lambda model, batch: {"rows": (kind(6.0), kind(2.0))},
            nominal_weight=kind(2.0),
        )

    plain, other = (hvdtrain.train(OPTIONS, task(kind)) for kind in (float, number))
    assert read_losses(other.run_dir) == read_losses(plain.run_dir)
    assert other.metrics == plain.metrics == {"rows": 3.0}
    assert read_events(other.run_dir, "warning") == []
    assert series(other.run_dir / "tensorboard", "loss/train").keys() >= {1, 5}


def test_a_task_object_never_takes_another_ones_run() -> None:
    base = toy()
    for number in range(2):
        stopped = {**OPTIONS, "train": {**OPTIONS["train"], "stop_at": 2}}
        result = hvdtrain.train(stopped, hvdtrain.Task(base.model, base.loss, base.train_data))
        assert (result.resumed_at, len(list(Path("runs").iterdir()))) == (0, number + 1)


@pytest.mark.slow
def test_train_in_a_loader_process_names_the_guard() -> None:
    Path("unguarded.py").write_text(
        "import hvdtrain\nfrom tests.support.toy import toy\n"
        f"hvdtrain.train({{**{OPTIONS!r}, 'loader': {{'workers': 1}}}}, toy)\n"
    )
    done = run(["unguarded.py"], cwd=Path.cwd(), environment={"PYTHONPATH": str(ROOT)}, check=False)
    assert done.returncode != 0
    assert "if __name__" in done.stderr


def test_other_data_is_noticed_on_resume(capsys: pytest.CaptureFixture[str]) -> None:
    hvdtrain.train({**OPTIONS, "run_dir": "run", "train": {**OPTIONS["train"], "stop_at": 3}}, toy)
    hvdtrain.train({**OPTIONS, "run_dir": "run", "samples": 40}, toy)
    out = capsys.readouterr().out
    assert "50 samples before, 40 now" in out and "samples: 50 -> 40" in out


@pytest.mark.slow
def test_threads_are_shared_out_though_torch_came_first(tmp_path: Path) -> None:
    """A script that imports torch before it calls train: each of two ranks takes half of the cores all the same."""
    script = (
        "import torch, os\nimport hvdtrain\nfrom tests.support.toy import toy\n"
        f"hvdtrain.train({{**{OPTIONS!r}, 'run_dir': 'run'}}, toy)\n"
        "os.write(1, f'threads {torch.get_num_threads()}\\n'.encode())\n"
    )
    (tmp_path / "script.py").write_text(script)
    done = run(["script.py"], size=2, cwd=tmp_path, environment={"PYTHONPATH": str(ROOT)}, without=("OMP_NUM_THREADS",))
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert done.stdout.count(f"threads {share}") == 2
