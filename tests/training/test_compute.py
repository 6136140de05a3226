"""How much a run computes: a sample's share of a formula, counted without a pass more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hvdtrain
from hvdtrain.config.schema import Config, ObserveConfig, ParallelConfig, TrainConfig
from hvdtrain.task.base import Task
from hvdtrain.training.records.compute import FirstPass
from tests.support.journals import read_events
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


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"per_sample": 3 * FORWARD, "device": "cpu", "peak_per_s": None, "peak_source": None}),
        # Ranks with the same samples share a pass.
        ({"size": 8, "parallel": ParallelConfig(tp=2, cp=2, ep=8)}, {"per_sample": 4 * 3 * FORWARD}),
        # The peak that the user gives is one device's.
        ({"size": 4, "observe": ObserveConfig(peak_tflops=2.5)}, {"peak_per_s": 10e12}),
    ],
    ids=["one", "same samples", "peak"],
)
def test_training_counts_three_times_a_forward_pass_and_is_reported_once(
    options: dict[str, Any], expected: dict[str, Any]
) -> None:
    (found,) = _told(toy(), **options)
    assert expected.items() <= found.items()


def test_the_first_pass_of_training_is_counted_and_no_pass_more_is_run(tmp_path: Path) -> None:
    """Not that of an evaluation; and the task is not made again."""
    calls: list[str] = []

    def build() -> Task:
        calls.append("made")
        base = toy(heldout=2)

        def loss(model: nn.Module, batch: Any) -> Any:
            calls.append("trained" if torch.is_grad_enabled() else "evaluated")
            return base.loss(model, batch)

        return replace(base, loss=loss)

    hvdtrain.train({"train": {"steps": 2, "global_batch": 4, "micro_batch": 2}, "run_dir": str(tmp_path)}, build)
    assert calls == ["made", "evaluated", *["trained"] * 4, "evaluated"]
    (found,) = read_events(tmp_path, "flops")
    assert found["per_sample"] == 3 * FORWARD


def test_a_model_without_products_has_no_figure() -> None:
    assert _told(replace(toy(), loss=lambda model, batch: (batch[0].sum(), 1.0))) == []
