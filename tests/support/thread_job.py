"""Whole jobs of training in this process: its ranks are threads, the rest is what `python -m hvdtrain` does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from hvdtrain.comm.rounds import OneRound
from hvdtrain.config.parse import parse_argv, task_spec
from hvdtrain.runtime.environment import RankInfo
from hvdtrain.runtime.timeline import TimelinePlan
from hvdtrain.task.base import Task, load_task_function
from hvdtrain.training.callbacks.base import Callback
from hvdtrain.training.result import Result
from hvdtrain.training.session import run_training
from tests.support.thread_comm import ThreadComm, on_ranks


def train_on_threads(
    *options: str, size: int, build: Callable[[int], Task] | None = None, callbacks: Sequence[Callback] = ()
) -> list[Result]:
    """Train on `size` ranks with the options of a command line; what each rank returns.

    `build` makes the task of a rank, in place of the one that the options name. Each rank has copies of `callbacks`.
    """

    function = load_task_function(task_spec(list(options)))
    parsed = parse_argv(list(options), function)  # which takes a fifth of a short training

    def body(comm: ThreadComm) -> Result:
        run = copy.deepcopy(parsed)
        make = partial(function, **run.task_args) if build is None else partial(build, comm.rank)
        info = RankInfo("threads", comm.rank, comm.size, comm.rank, comm.size, folder=Path.cwd())
        return run_training(run, make, OneRound(comm), TimelinePlan("off"), info, callbacks=copy.deepcopy(callbacks))

    return on_ranks(size, body)
