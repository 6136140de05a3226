"""Callbacks: when they are called, what they may change, what comes back in a resume; EMA and early stopping."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import hvdtrain
from hvdtrain.comm.base import Comm
from hvdtrain.state.checkpoint_store import Measure, load
from hvdtrain.training.callbacks.group import Callbacks, EarlyStopping
from hvdtrain.training.loop.evaluate import Evaluation
from tests.support.journals import read_events, read_losses
from tests.support.thread_comm import on_ranks
from tests.support.thread_job import train_on_threads
from tests.support.toy import toy

OPTIONS: dict[str, Any] = {
    "train": {"steps": 8, "global_batch": 4, "micro_batch": 2},
    "checkpoint": {"every": 4, "keep": 9},
    "run_dir": "run",
}
ARGUMENTS = ("--task=tests.support.toy:toy", "--train.global_batch=4", "--train.micro_batch=2", "--checkpoint.every=4")
pytestmark = pytest.mark.usefixtures("own_folder")


def _train(*callbacks: hvdtrain.Callback, task: Any = toy, checkpoint: Any = None, **train: Any) -> hvdtrain.Result:
    checkpoint = {**OPTIONS["checkpoint"], **(checkpoint or {})}
    options = {**OPTIONS, "train": {**OPTIONS["train"], **train}, "checkpoint": checkpoint}
    return hvdtrain.train(options, task, callbacks=callbacks)


class Note(hvdtrain.Callback):
    def __init__(self, every: int = 1) -> None:
        self.every, self.calls, self.known = every, list[tuple[str, int]](), 0

    def on_begin(self, training: Any) -> None:
        self.calls.append(("begin", training.step))

    def on_step(self, training: Any, record: Mapping[str, Any]) -> None:
        self.calls.append(("step", record["step"]))

    def on_evaluation(self, training: Any, evaluation: Any) -> None:
        self.calls.append(("evaluation", training.step))
        evaluation.metrics["noted"] = float(training.step)

    def on_checkpoint(self, training: Any) -> None:
        self.calls.append(("checkpoint", training.step))

    def on_end(self, training: Any, reason: str) -> None:
        self.calls.append((reason, training.step))

    def state_dict(self) -> dict[str, Any]:
        return {"calls": len(self.calls), "step": torch.tensor(self.calls[-1][1] if self.calls else 0)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.known = state["calls"] + int(state["step"])


def test_calls_and_their_order() -> None:
    note = Note(every=3)
    assert _train(note).metrics["noted"] == 8
    saved = [(name, step) for step in (4, 8) for name in ("evaluation", "checkpoint")]
    steps = sorted([("step", 3), ("step", 6), *saved], key=lambda call: call[1])
    assert note.calls == [("begin", 0), ("evaluation", 0), *steps, ("finished", 8)]


def test_state_comes_back_or_is_dropped_with_its_callback(capfd: pytest.CaptureFixture[str]) -> None:
    _train(Note(), stop_at=4)
    note = Note()
    _train(note, stop_at=6)
    assert note.known == 8 + 4  # begin, an evaluation, four steps, an evaluation, a checkpoint; at step 4
    assert note.calls[0] == ("begin", 4)
    _train()
    assert "is dropped: Note" in capfd.readouterr().out


class Stop(hvdtrain.Callback):
    def __init__(self, where: str, rank: int = 0) -> None:
        self._where, self._rank = where, rank

    def _ask(self, where: str, training: Any) -> None:
        if where == self._where and training.rank == self._rank:
            training.stop("enough")

    def on_begin(self, training: Any) -> None:
        self._ask("begin", training)

    def on_step(self, training: Any, record: Mapping[str, Any]) -> None:
        self._ask(f"step {record['step']}", training)

    def on_evaluation(self, training: Any, evaluation: Any) -> None:
        self._ask(f"evaluation {training.step}", training)


@pytest.mark.parametrize(
    ("where", "ends"), [("begin", 0), ("evaluation 0", 0), ("step 2", 3), ("evaluation 4", 4), ("step 7", 8)]
)
def test_one_rank_ends_training_on_all(where: str, ends: int) -> None:
    results = train_on_threads(*ARGUMENTS, "--train.steps=8", "--run_dir=run", size=2, callbacks=[Stop(where, rank=1)])
    assert [(result.step, result.reason) for result in results] == [(ends, "enough")] * 2
    assert max(event["at_step"] for event in read_events("run", "evaluation")) == ends
    assert [event["reason"] for event in read_events("run", "finished")] == ["enough"]
    assert (Path("run/checkpoints") / f"step-{ends:06d}").is_dir() == (ends > 0)


def _without_progress() -> hvdtrain.Task:
    task = toy(dropout=0)
    return replace(task, optimizer=torch.optim.SGD(task.model.parameters(), lr=0.0))


def test_training_ends_without_progress_and_a_resume_ends_at_once() -> None:
    for patience, step in ((3, 3), (3, 3), (4, 4), (9, 8)):
        result = _train(task=_without_progress, eval_every=1, patience=patience)
        assert result.step == step
        assert (f"not improved in {patience} evaluations" in result.reason) is (patience != 9)


@pytest.mark.parametrize(
    ("evaluations", "stops_at"),
    [
        # The 4 evaluations after the best one end training, not 4 in all.
        ([(0, 5.0), (1, 6.0), (2, 6.0), (3, 4.0), (4, 7.0), (5, 7.0), (6, 7.0), (7, 7.0), (8, 1.0)], [7]),
        # One that is repeated, as after a lost rank, counts once.
        ([(0, 1.0), (0, 1.0), (1, 2.0), (1, 2.0), (2, 2.0), (3, 2.0)], []),
    ],
)
def test_progress_counts_anew(evaluations: list[tuple[int, float]], stops_at: list[int]) -> None:
    stopped: list[int] = []
    stopping = EarlyStopping(4, Measure("given"))
    for step, value in evaluations:
        training: Any = SimpleNamespace(step=step, stop=lambda why, step=step: stopped.append(step))
        stopping.on_evaluation(training, Evaluation(9.0, {"given": value}))
    assert stopped == stops_at


class Follow(hvdtrain.Callback):
    def __init__(self, decay: float) -> None:
        self._decay, self.found = decay, dict[str, Tensor]()

    def on_begin(self, training: Any) -> None:
        self.found = {name: p.detach().double().clone() for name, p in training.model.named_parameters()}

    def on_step(self, training: Any, record: Mapping[str, Any]) -> None:
        decay = min(self._decay, (1 + training.step) / (10 + training.step))
        for name, parameter in training.model.named_parameters():
            self.found[name] = decay * self.found[name] + (1 - decay) * parameter.detach().double()


def _averages(run: str, step: int) -> dict[str, Tensor]:
    stored = load(Path(run, "checkpoints", f"step-{step:06d}")).tensors["callbacks"]
    return {name.removeprefix("EMA/"): tensor for name, tensor in stored.items()}


@pytest.mark.parametrize("decay", [0.2, 0.9])
def test_the_average_is_right_and_changes_no_training(decay: float) -> None:
    """Its loss is that of a model with its values."""
    follow = Follow(decay)
    _train(follow, ema=decay)
    found = _averages("run", 8)
    assert found.keys() == follow.found.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor.double(), follow.found[name], rtol=1e-5, atol=1e-7)
    hvdtrain.train({**OPTIONS, "run_dir": "plain"}, toy)
    assert read_losses("plain") == read_losses("run")
    plain, averaged = (load(Path(run, "checkpoints/step-000008")) for run in ("plain", "run"))
    for group in ("model", "optimizer"):
        assert all(torch.equal(tensor, averaged.tensors[group][name]) for name, tensor in plain.tensors[group].items())

    def average() -> hvdtrain.Task:
        task = toy()
        task.model.load_state_dict(follow.found)
        return task

    hvdtrain.train({**OPTIONS, "run_dir": "average", "train": {**OPTIONS["train"], "stop_at": 1}}, average)
    expected = read_events("average", "evaluation")[0]["loss"]
    evaluations = read_events("run", "evaluation")
    assert evaluations[-1]["metrics"]["ema_loss"] == pytest.approx(expected, rel=1e-5)
    assert all(event["seconds"] > 0 for event in evaluations)


def test_all_ranks_have_the_same_callbacks() -> None:
    def body(comm: Comm) -> str:
        with pytest.raises(hvdtrain.HvdtrainError, match="the ranks have different callbacks") as caught:
            Callbacks([Note()] if comm.rank == 0 else []).begin(None, comm)  # type: ignore[arg-type]
        return str(caught.value)

    assert all("on rank 1: none" in text for text in on_ranks(2, body))


def _callback(**members: Any) -> Any:
    return type("Odd", (hvdtrain.Callback,), members)()


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (lambda: _train(Note(), Note()), "same class"),
        (lambda: _train("text"), "str is no callback"),  # type: ignore[arg-type]
        (lambda: _train(_callback(every=0)), "Odd is no callback"),
        (lambda: _train(_callback(state_dict=lambda self: {"set": {1, 2}})), "Odd/set"),
        (lambda: _train(patience=2, task=lambda: toy(heldout=0)), "no held-out data"),
        (lambda: _train(checkpoint={"best": "accurate"}), "no such value"),
        (lambda: _train(checkpoint={"best": "loss:most"}), "--checkpoint.best"),
        (lambda: _train(ema=1.0), "--train.ema"),
        (lambda: hvdtrain.train({**OPTIONS, "callbacks": "json:JSONDecoder"}, toy), "is no callback"),
    ],
)
def test_what_is_refused(train: Callable[[], object], message: str) -> None:
    with pytest.raises(hvdtrain.HvdtrainError, match=message):
        train()


def test_options_name_callbacks(capfd: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text(
        "import hvdtrain\n\n\nclass Mine(hvdtrain.Callback):\n"
        "    def on_end(self, training, reason):\n        training.say(f'{reason} on {training.size}')\n"
    )
    train_on_threads(*ARGUMENTS, "--train.steps=2", "--run_dir=run", "--callbacks=mine.py:Mine", size=2)
    assert capfd.readouterr().out.count("finished on 2") == 1
