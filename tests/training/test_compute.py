"""How much a run computes: a sample's share of a formula, and no effect on the run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from hvdtrain.config.schema import Config, LoaderConfig, ObserveConfig
from hvdtrain.task.base import Task
from hvdtrain.training.compute import describe_compute
from tests.support.toy import toy

CPU = torch.device("cpu")
FORWARD = 2 * (6 * 16 + 16 * 1)
"""Of the toy's two layers, for one sample."""


def _describe(task: Task, size: int = 1, **options: Any) -> dict[str, Any] | None:
    return describe_compute(task, task.model, Config(**options), CPU, size)


def test_training_takes_three_times_a_forward_pass() -> None:
    found = _describe(toy())
    assert found is not None
    assert found["per_sample"] == 3 * FORWARD
    assert (found["device"], found["peak_per_s"], found["peak_source"]) == ("cpu", None, None)


def test_the_peak_that_the_user_gives_is_one_device_s() -> None:
    found = _describe(toy(), size=4, observe=ObserveConfig(peak_tflops=2.5))
    assert found is not None
    assert found["peak_per_s"] == 10e12


def test_loader_processes_find_their_data_unread() -> None:
    task = toy()
    broken = replace(task, train_data=[None])  # type: ignore[arg-type]
    assert _describe(broken) is None
    found = _describe(broken, loader=LoaderConfig(workers=2))
    assert found is not None
    assert found["per_sample"] == 3 * FORWARD
    assert _describe(replace(broken, heldout_data=None), loader=LoaderConfig(workers=2)) is None


def test_what_cannot_be_counted_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        raise ZeroDivisionError("no loss today")

    task = replace(toy(), loss=loss)
    with caplog.at_level("DEBUG", logger="hvdtrain"):
        assert _describe(task) is None
    assert "no loss today" in caplog.text
    assert task.model.training


def test_a_model_without_products_has_no_figure() -> None:
    task = replace(toy(), loss=lambda model, batch: (batch[0].sum(), 1.0))
    assert _describe(task) is None


def test_random_numbers_follow_as_if_nothing_had_been() -> None:
    task = toy()
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    _describe(task)
    assert torch.equal(torch.rand(4), expected)
