"""How much a run computes: a sample's share of a formula, counted without a pass more."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hvdtrain
from hvdtrain.config.schema import Config, ObserveConfig, ParallelConfig, TrainConfig
from hvdtrain.observe.past_journal import read_journal
from hvdtrain.task.base import Task
from hvdtrain.training.records.compute import FirstPass
from tests.support.toy import toy

CPU = torch.device("cpu")
FORWARD = 2 * (6 * 16 + 16 * 1)
"""Of the toy's two layers, for one sample."""


def _told(task: Task, size: int = 1, passes: int = 2, **options: Any) -> list[dict[str, Any]]:
    config = Config(train=TrainConfig(micro_batch=4), **options)
    told: list[dict[str, Any]] = []
    around = FirstPass(config, CPU, size, told.append)
    x = torch.ones(4, 6)
    for _ in range(passes):
        with around():
            task.loss(task.model, (x, x.sum(1)))
    return told


def test_training_counts_three_times_a_forward_pass_and_is_reported_once() -> None:
    (found,) = _told(toy())
    assert found["per_sample"] == 3 * FORWARD
    assert (found["device"], found["peak_per_s"], found["peak_source"]) == ("cpu", None, None)


def test_ranks_with_the_same_samples_share_a_pass() -> None:
    (found,) = _told(toy(), size=8, parallel=ParallelConfig(tp=2, cp=2, ep=8))
    assert found["per_sample"] == 4 * 3 * FORWARD


def test_the_peak_that_the_user_gives_is_one_devices() -> None:
    (found,) = _told(toy(), size=4, observe=ObserveConfig(peak_tflops=2.5))
    assert found["peak_per_s"] == 10e12


@dataclass(frozen=True)
class Own(Task):
    """A task of a user's, which notes when it is made and when its loss is taken."""

    def __post_init__(self) -> None:
        calls.append("made")
        loss = self.loss

        def noted(model: nn.Module, batch: Any) -> Any:
            calls.append("trained" if torch.is_grad_enabled() else "evaluated")
            return loss(model, batch)

        object.__setattr__(self, "loss", noted)


calls: list[str] = []


def test_the_first_pass_of_training_is_counted_and_no_pass_more_is_run(tmp_path: Path) -> None:
    """Not that of an evaluation; and the task is neither copied nor made again."""
    base = toy(heldout=2)
    calls.clear()
    task = Own(base.model, base.loss, base.train_data, base.heldout_data)
    train_options = {"steps": 2, "global_batch": 4, "micro_batch": 2}
    hvdtrain.train({"train": train_options, "run_dir": str(tmp_path / "run")}, task)
    assert calls == ["made", "evaluated", *["trained"] * 4, "evaluated"]
    events = [line["event"] for line in read_journal(tmp_path / "run/journal.jsonl") if "event" in line]
    assert events.index("evaluation") < events.index("flops")
    (found,) = (line for line in read_journal(tmp_path / "run/journal.jsonl") if line.get("event") == "flops")
    assert found["per_sample"] == 3 * FORWARD


def test_a_model_without_products_has_no_figure() -> None:
    assert _told(replace(toy(), loss=lambda model, batch: (batch[0].sum(), 1.0))) == []
