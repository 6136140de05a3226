"""Slow down one rank of a task, to try out the cost of a straggler."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

from hvdtrain.runtime.environment import environ, rank_info
from hvdtrain.task.base import Task, load_task_function


def slowed(spec: str, rank: int, sleep_s: float) -> Callable[..., Task]:
    """Return the function that `spec` names, but its task sleeps on `rank` before each loss in training."""
    function = load_task_function(spec)

    @wraps(function)
    def build(*given: Any, **named: Any) -> Task:
        task = function(*given, **named)
        if rank_info(environ()).rank != rank:
            return task

        def loss(model: Any, batch: Any) -> Any:
            if model.training:
                time.sleep(sleep_s)
            return task.loss(model, batch)

        return replace(task, loss=loss)

    return build
