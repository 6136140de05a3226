"""A task of which one rank is slower than it has to be: to try what that costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

from hvdtrain.runtime.environment import environ, rank_info
from hvdtrain.task.base import Task, load_task_function


def slowed(spec: str, rank: int, sleep_s: float) -> Callable[..., Task]:
    """The function that `spec` names, with the same parameters; its task sleeps on `rank` before each loss."""
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
