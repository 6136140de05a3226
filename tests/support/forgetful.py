"""The toy task with state that no checkpoint holds: how often this process has asked for the loss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from hvdtrain import Task
from tests.support.toy import toy


def forgetful() -> Task:
    """A small regression whose loss is another one after every call."""
    task, calls = toy(), [0]

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | float]:
        value, weight = task.loss(model, batch)
        calls[0] += model.training
        return value * (1.0 + 0.01 * calls[0]), weight

    return replace(task, loss=loss)
