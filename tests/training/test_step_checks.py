"""Runs with non-finite numbers: the journal, the output and the error report them, and training continues unchanged."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hvdtrain
from hvdtrain import Task
from hvdtrain.data.loader import Stream
from hvdtrain.errors import NonFiniteError, TaskError
from hvdtrain.observe.past_journal import read_steps
from hvdtrain.training.diagnostics import step_checks
from tests.support import faulty
from tests.support.gallery import Recorded
from tests.support.journals import read_events
from tests.support.toy import toy

OPTIONS = ("--train.steps=6", "--train.global_batch=8", "--checkpoint.every=0")
pytestmark = pytest.mark.usefixtures("own_folder")


def _config(**train_options: Any) -> dict[str, Any]:
    steps = {"steps": 6, "global_batch": 8, "micro_batch": 4, **train_options}
    return {"train": steps, "checkpoint": {"every": 0}, "run_dir": "run"}


def _events(name: str, run: str = "run") -> list[dict[str, Any]]:
    return read_events(run, name)


def _index(position: int) -> int:
    """Of the sample at a position, in the data set of `faulty` under seed 0."""
    stream = Stream(faulty.Marked(16, []), 0, 8, 4, 0, 1)
    return [i for key in stream.keys(0, 4) for i in key[1:]][position]


def test_a_skipped_step_is_reported_and_training_continues(capsys: pytest.CaptureFixture[str]) -> None:
    hvdtrain.train(_config(), faulty.faulty(faulty.divides, [_index(13)]))
    (found,) = [e for e in _events("not_finite") if e["at_step"] == 2]
    facts = {"kind": "forward", "module": "blocks.1", "rank": 0, "samples": [13], "indices": [_index(13)]}
    assert facts.items() <= found.items()
    assert [e["reason"] for e in _events("skipped_step")] == ["loss not finite"] * 3, "an epoch is of two steps"
    warning = next(line for line in capsys.readouterr().out.splitlines() if "step 2 was skipped" in line)
    for words in ("blocks.1", "torch.Tensor.div", "faulty.py:", "rank 0", "position 13"):
        assert words in warning
    steps = read_steps(Path("run/journal.jsonl"))
    assert [step for step, line in steps.items() if line["skipped"]] == [e["step"] for e in _events("skipped_step")]


def _by_step(factor: Callable[[int], float]) -> Task:
    """A task whose loss is a factor of the step, counted from 1, times something near 1; 0 stands for log(0)."""
    torch.manual_seed(0)
    now = {"step": 0}

    def schedule(step: int) -> float:
        now["step"] = step + 1
        return 1e-9

    def loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
        scale = factor(now["step"])
        value = torch.exp(0.1 * model(batch[0])).sum()
        return value * scale if scale else value + torch.log(value - value), len(batch[0])

    data = torch.utils.data.TensorDataset(torch.ones(8, 4))
    return Task(nn.Linear(4, 1), loss, data, schedule=schedule)


def test_looks_are_bounded_and_the_last_is_in_the_error() -> None:
    task = _by_step(lambda step: 0.0 if step % 2 or step > 20 else 1.0)
    with pytest.raises(NonFiniteError) as caught:
        hvdtrain.train(_config(steps=30, max_skipped=2), task)
    assert len(_events("skipped_step")) == 12
    assert [e["at_step"] for e in _events("not_finite")] == [1, 3, 5, 22]
    assert "2 steps in a row" in str(caught.value)
    assert "torch.log" in str(caught.value.found)
    assert _events("failed")


def test_a_batch_without_weight_is_named_and_not_looked_into() -> None:
    with pytest.raises(NonFiniteError, match=r"weight .* not positive 2 steps in a row"):
        hvdtrain.train(_config(max_skipped=2), lambda: _weighted(0))
    assert ["weight" in e["reason"] for e in _events("skipped_step")] == [True, True]
    assert _events("not_finite") == []


def test_a_replay_that_raises_ends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    base = faulty.faulty(faulty.divides, [_index(1)])
    calls = {"left": 3}

    def loss(model: nn.Module, x: Tensor) -> tuple[Tensor, float]:
        calls["left"] -= 1
        if calls["left"] == 0:
            raise OSError("the disk it wrote to is full")
        return base.loss(model, x)  # type: ignore[return-value]

    result = hvdtrain.train(_config(), replace(base, loss=loss))
    assert result.reason == "finished"
    assert _events("not_finite")[0]["failures"] == {"0": "OSError: the disk it wrote to is full"}
    assert "rank 0 failed: OSError" in capsys.readouterr().out


def test_a_cause_that_a_replay_does_not_repeat_is_reported_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    spoilt = iter([float("nan"), 0.0])
    base = toy(heldout=0)

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        value, weight = base.loss(model, batch)
        return value + next(spoilt, 0.0), weight  # type: ignore[return-value]

    hvdtrain.train(_config(), replace(base, loss=loss))
    (found,) = _events("not_finite")
    assert (found["kind"], found["positions"]) == ("unknown", [0, 8])
    assert "each rank's part is finite" in capsys.readouterr().out


def test_fp16_finding_its_scale_is_no_matter() -> None:
    task = replace(faulty.faulty(nn.Identity(), []), loss=lambda model, x: ((model(x) * 100.0).sum(), len(x)))
    hvdtrain.train({**_config(steps=8), "precision": "fp16"}, task)
    reasons = [e["reason"] for e in _events("skipped_step")]
    assert reasons[:2] == ["gradient overflow at scale 65536", "gradient overflow at scale 32768"]
    assert 2 <= len(reasons) < 8
    assert _events("not_finite") == []
    with pytest.raises(NonFiniteError, match="a gradient too large for its format"):
        hvdtrain.train({**_config(max_skipped=2), "precision": "fp16", "run_dir": "ends"}, task)
    assert [e["kind"] for e in _events("not_finite", "ends")] == ["overflow"]


def test_an_overflow_at_a_stable_scale_is_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_checks, "_STABLE", 10)
    hvdtrain.train({**_config(steps=30), "precision": "fp16"}, _by_step(lambda step: 1e3 if step == 25 else 1e-3))
    skipped = {e["at_step"]: e["reason"] for e in _events("skipped_step")}
    assert "gradient overflow" in skipped.pop(25)
    assert [e["at_step"] for e in _events("not_finite")] == [25]
    assert all(step < 10 for step in skipped)


def test_looks_are_bounded_within_a_number_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_checks, "_WITHIN", 50)
    bad = (5, 10, 15, 20, 53, 56, 80)
    hvdtrain.train(_config(steps=80), _by_step(lambda step: 0.0 if step in bad else 1.0))
    assert [e["at_step"] for e in _events("not_finite")] == [5, 10, 15, 56, 80]


@pytest.mark.parametrize("stop", [None, 38])
def test_a_spike_is_reported_once_also_right_after_a_resume(
    stop: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """So is the jump of the gradient."""

    def noisy(step: int) -> float:
        return (5.0 if 40 <= step < 46 else 1.0) * (1 + 0.02 * (step * 7 % 5 - 2))

    for end in filter(None, (stop, 60)):
        hvdtrain.train(_config(steps=60, stop_at=end), _by_step(noisy))
    (found,) = _events("loss_spike")
    loss = read_steps(Path("run/journal.jsonl"))[40]["loss"]
    assert (found["at_step"], found["loss"], found["positions"]) == (40, loss, [39 * 8, 40 * 8])
    assert found["expected"] == pytest.approx(loss / 5, rel=0.1)
    assert capsys.readouterr().out.count("the loss jumped to") == 1
    assert stop or [e["at_step"] for e in _events("grad_norm_spike")] == [40]


@pytest.mark.parametrize(("culprit", "kind"), [(faulty.divides, "forward"), (faulty.roots, "backward")])
def test_the_rank_that_made_it_is_named_and_ranks_continue_as_one(
    culprit: Callable[[Tensor], Tensor], kind: str, trained: Callable[..., Recorded], capsys: pytest.CaptureFixture[str]
) -> None:
    """The second micro-batch is that of rank 1. Equal parameters are checked where the run ends."""
    losses, marks = [], [_index(6)]
    for size in (1, 2):
        options = (*OPTIONS, "--train.micro_batch=4")
        run = trained(str(size), *options, size=size, build=lambda rank: faulty.faulty(culprit, marks))
        expected = {"kind": kind, "rank": size - 1, "module": "blocks.1", "samples": [6], "indices": marks}
        assert expected.items() <= run.events("not_finite")[0].items()
        assert capsys.readouterr().out.count("step 1 was skipped") == 1
        losses.append([loss or 0.0 for loss in run.losses()])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_a_rank_that_idles_waits_for_the_others(trained: Callable[..., Recorded]) -> None:
    options = (*OPTIONS, "--train.micro_batch=8", "--train.max_skipped=1")
    with pytest.raises(NonFiniteError, match="not finite 1 steps in a row"):
        trained("two", *options, size=2, build=lambda rank: faulty.faulty(faulty.divides, [_index(6)]))
    (found,) = _events("not_finite", "two/run")
    assert (found["module"], found["samples"], found["failures"]) == ("blocks.1", [6], {})


def _weighted(weight: Any, **others: Any) -> Task:
    model = nn.Linear(1, 1)
    data = torch.utils.data.TensorDataset(torch.ones(16, 1))
    return Task(model, lambda model, batch: (model(batch[0]).sum(), weight), data, **others)


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf, torch.tensor(-2.0)])
def test_an_invalid_weight_is_a_task_error(weight: Any) -> None:
    with pytest.raises(TaskError, match="returned an invalid weight"):
        hvdtrain.train(_config(), lambda: _weighted(weight))


@pytest.mark.parametrize("factor", [math.nan, math.inf, -0.5])
def test_an_invalid_learning_rate_is_reported_with_its_step(factor: float) -> None:
    with pytest.raises(TaskError, match=rf"invalid learning rate at step 3(?s:.*)factor {factor}"):
        hvdtrain.train(_config(), lambda: _weighted(1, schedule=lambda step: factor if step == 2 else 1.0))


def test_parameters_that_the_tasks_optimizer_leaves_out_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    task = _weighted(1)
    hvdtrain.train(_config(), replace(task, optimizer=torch.optim.SGD([task.model.bias], lr=0.1)))  # type: ignore[list-item]
    assert "do not change: weight" in capsys.readouterr().out


class Counting(torch.optim.SGD):
    """Keeps `kept` where no checkpoint looks."""

    def __init__(self, parameters: Any, kept: str) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.count, self.constant, self.other = 0, torch.ones(3), {"mean": [torch.zeros(1)]}
        self.inner = torch.optim.Adam(parameters) if kept == "inner" else None
        self.param_groups[0]["mean"] = torch.zeros(1)
        self.kept = kept

    def step(self, closure: Any = None) -> Any:
        if self.kept == "count":
            self.count += 1
        elif self.kept == "mean of group 0":
            self.param_groups[0]["mean"] += 1
        elif self.kept == "other":
            self.other["mean"][0] += 1
        elif self.inner is not None:
            self.inner.step()
        return super().step(closure)


@pytest.mark.parametrize("kept", ["nothing", "count", "mean of group 0", "other", "inner"])
def test_state_of_an_optimizer_that_is_not_saved_is_named(kept: str, capsys: pytest.CaptureFixture[str]) -> None:
    task = _weighted(1)
    hvdtrain.train(_config(), replace(task, optimizer=Counting([*task.model.parameters()], kept)))
    found = [line for line in capsys.readouterr().out.splitlines() if "Counting keeps values" in line]
    assert [f": {kept};" in line for line in found] == [True] * (kept != "nothing")


def test_what_torch_notes_of_its_fused_optimizers_is_not_state(capsys: pytest.CaptureFixture[str]) -> None:
    hvdtrain.train({**_config(), "optimizer": {"name": "sgd"}}, _weighted(1))
    assert "keeps values" not in capsys.readouterr().out


@pytest.mark.parametrize("where", ["build", "loss"])
def test_a_task_that_ends_the_process_is_reported_as_an_error(where: str) -> None:
    def leave() -> None:
        sys.exit("enough")

    def build() -> Task:
        if where == "build":
            leave()
        return replace(_weighted(1), loss=lambda model, batch: leave())

    with pytest.raises(TaskError, match="the task's code ended this process") as caught:
        hvdtrain.train(_config(), build)
    assert f"sys.exit('enough') in leave, {__file__}:" in str(caught.value.found)
    if where == "loss":
        assert "sys.exit('enough')" in Path("run/failure.json").read_text()
