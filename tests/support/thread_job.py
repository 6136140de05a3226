"""Whole jobs of training in this process: its ranks are threads, the rest is what `python -m hvdtrain` does.

In elastic ones, a plan says who is in which round and how it ends.
"""

from __future__ import annotations

import copy
import gc
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from hvdtrain.comm.base import Comm
from hvdtrain.comm.rounds import OneRound, Rounds
from hvdtrain.config.parse import parse_argv, task_spec
from hvdtrain.runtime.driver_client import NoPlace
from hvdtrain.runtime.environment import RankInfo
from hvdtrain.runtime.tuning import TimelinePlan
from hvdtrain.task.base import Task, load_task_function
from hvdtrain.training.callbacks.base import Callback
from hvdtrain.training.result import Result
from hvdtrain.training.session import run_training
from tests.support.thread_comm import Hub, Lost, ThreadComm, on_ranks


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


@dataclass(frozen=True)
class Period:
    """A round.

    Attributes:
        workers: numbers of the processes, in the order of their ranks.
        steps: that are begun in it; 0 for all that are left.
        killed: who is killed at the beginning of the last of them; with none, the ranks change at its end.
    """

    workers: tuple[int, ...]
    steps: int = 0
    killed: tuple[int, ...] = ()


class Killed(BaseException):
    """The end of a process that is killed."""


class PlannedRounds(Rounds):
    def __init__(self, worker: int, plan: Sequence[Period], hubs: Sequence[Hub]) -> None:
        super().__init__(RankInfo("threads"))
        self._worker, self._plan, self._hubs = worker, plan, hubs
        self._number = -1
        self._begun = 0
        self._killed = False

    def enter(self, why: str, text: str = "", step: int = -1) -> Comm:
        if self._killed:
            raise Killed
        later = range(self._number + 1, len(self._plan))
        self._number = next((number for number in later if self._worker in self._plan[number].workers), len(self._plan))
        if self._number == len(self._plan):
            raise NoPlace
        self._begun = 0
        return ThreadComm(self._hubs[self._number], self._period.workers.index(self._worker))

    @property
    def _period(self) -> Period:
        return self._plan[self._number]

    def is_over(self, error: BaseException) -> bool:
        return isinstance(error, (Lost, Killed))  # a process that is killed writes no failure card, either

    def requests(self, requests: list[int], changed: int, terminate: int) -> list[int]:
        found, self._begun = list(requests), self._begun + 1
        if self._begun == self._period.steps:
            if self._worker in self._period.killed:
                self._hubs[self._number].break_off()
                self._killed = True
                raise Killed
            found[changed] = int(not self._period.killed)
        return found

    def is_leaving(self) -> bool:
        following = self._plan[self._number + 1 :]
        return bool(following) and not self._period.killed and self._worker not in following[0].workers


def train_in_rounds(*options: str, plan: Sequence[Period], build: Callable[[], Task]) -> None:
    """Train with the options of a command line. The first error of a rank is raised.

    The tasks are built before any rank starts: threads share torch's random numbers.
    """
    hubs = [Hub(len(period.workers)) for period in plan]
    errors: list[BaseException] = []
    workers = sorted({worker for period in plan for worker in period.workers})
    tasks: dict[int, Task] = {}

    def build_for(worker: int) -> None:
        torch.manual_seed(0)
        tasks[worker] = build()

    for worker in workers:
        builder = threading.Thread(target=build_for, name=f"worker {worker}", args=(worker,))
        builder.start()
        builder.join()

    parsed = parse_argv(list(options), build)

    def work(worker: int) -> None:
        try:
            info = RankInfo("threads", folder=Path.cwd())
            run = copy.deepcopy(parsed)
            run_training(run, lambda: tasks[worker], PlannedRounds(worker, plan, hubs), TimelinePlan("off"), info)
        except (Killed, NoPlace):
            pass
        except BaseException as error:
            errors.append(error)
            for hub in hubs:
                hub.break_off()

    threads = [
        threading.Thread(target=work, name=f"worker {worker}", args=(worker,), daemon=True) for worker in workers
    ]
    gc.disable()  # a lost process ends without closing its files; the warnings about them are caught below
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect(1)  # all of the run's objects are young, as nothing was collected meanwhile
    finally:
        gc.enable()
    for error in errors:
        raise error
