"""How much a run computes: a sample's share of a formula, counted without a pass more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.config.schema import Config, ObserveConfig, TrainConfig
from hvdtrain.task.base import Task
from hvdtrain.training.compute import with_flops_counted
from tests.support.toy import toy

CPU = torch.device("cpu")
FORWARD = 2 * (6 * 16 + 16 * 1)
"""Of the toy's two layers, for one sample."""


def _told(task: Task, size: int = 1, passes: int = 2, **options: Any) -> list[dict[str, Any]]:
    config = Config(train=TrainConfig(micro_batch=4), **options)
    told: list[dict[str, Any]] = []
    counted = with_flops_counted(task, config, CPU, size, told.append)
    x = torch.ones(4, 6)
    for _ in range(passes):
        counted.loss(counted.model, (x, x.sum(1)))
    return told


def test_training_takes_three_times_a_forward_pass_and_is_told_once() -> None:
    (found,) = _told(toy())
    assert found["per_sample"] == 3 * FORWARD
    assert (found["device"], found["peak_per_s"], found["peak_source"]) == ("cpu", None, None)


def test_an_evaluation_is_not_counted() -> None:
    with torch.no_grad():
        assert _told(toy()) == []


def test_the_peak_that_the_user_gives_is_one_devices() -> None:
    (found,) = _told(toy(), size=4, observe=ObserveConfig(peak_tflops=2.5))
    assert found["peak_per_s"] == 10e12


def test_no_pass_more_is_run() -> None:
    task, calls = toy(), []

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        calls.append(batch)
        return task.loss(model, batch)

    assert len(_told(replace(task, loss=loss), passes=3)) == 1
    assert len(calls) == 3


def test_a_model_without_products_has_no_figure() -> None:
    assert _told(replace(toy(), loss=lambda model, batch: (batch[0].sum(), 1.0))) == []
