"""The task of the recorded runs: the toy, and a fault that the environment asks for, so that options stay the same."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

from hvdtrain import Task
from tests.support.failing import WAYS, rank
from tests.support.toy import toy

FAULT = "RECORDED_FAULT"
"""HOW:RANK:PASS: what a rank does in which of its forward passes of training, counted from 1."""


def recorded(dropout: float = 0.2) -> Task:
    """The toy.

    Args:
        dropout: share of the middle layer that is dropped
    """
    task = toy(dropout=dropout)
    how, bad, at = os.environ.get(FAULT, ":0:0").split(":")
    passes = 0

    def loss(model: Any, batch: Any) -> Any:
        nonlocal passes
        passes += model.training
        if how and model.training and passes == int(at) and rank() == int(bad):
            time.sleep(1.5)  # by then, the others wait for its gradients
            WAYS[how]()
        return task.loss(model, batch)

    return replace(task, loss=loss)
