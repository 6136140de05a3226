"""What a process carries from one round of an elastic job to the next, and what it has to offer to the others."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hvdtrain.comm.base import Comm
from hvdtrain.comm.rounds import Rounds
from hvdtrain.config.parse import RunConfig
from hvdtrain.data.loader import dataset_length
from hvdtrain.exchange.residual_transfer import is_residual
from hvdtrain.observe.recorder import Recorder
from hvdtrain.runtime.driver_client import JobFailed
from hvdtrain.runtime.environment import RankInfo
from hvdtrain.state.commits import Commits
from hvdtrain.state.train_state import Progress, TrainState
from hvdtrain.task.base import Task
from hvdtrain.training.loop.compiled import compile_blocks
from hvdtrain.training.loop.notices import Notices
from hvdtrain.training.loop.precision import Precision
from hvdtrain.training.loop.saving import EvaluationProgress
from hvdtrain.training.records.stamp_collection import Links
from hvdtrain.training.start.optimizers import bring_state, make_optimizer
from hvdtrain.training.start.schedule import factor, total_steps

NOTHING = -1
"""Stands for the step of a process that has nothing to offer."""


def _nothing() -> None:
    pass


@dataclass
class WorkerState:
    """A process's own: everything that does not depend on who the other ranks are.

    Attributes:
        task: with its model, which is on `device`.
        info: who this process was at its start.
        device: of this process, for good.
        precision: of forward and backward.
        state: of the training, with the exchange of the round it is in, or was in last.
        horizon: the step at which the schedule ends.
        schedule: factor on the learning rates by step.
        base_lrs: learning rate of each of the optimizer's groups at factor 1.
        notices: signals that came.
        commits: copies of the state.
        compiled: blocks of the model that are compiled.
        directory: of the run, as it was given; None until this process was told.
        recorder: of this rank; it goes on while the rank stays what it is.
        step: optimizer steps that this process's state holds for others to go on from; `NOTHING` where it holds none.
        last: what the journal holds of the newest step.
        links: what was found of the link between ranks.
        seen: which evaluations were made.
        given_up: tells, should there be no other round than the newest.
    """

    task: Task
    info: RankInfo
    device: torch.device
    precision: Precision
    state: TrainState
    horizon: int
    schedule: Callable[[int], float]
    base_lrs: list[float]
    commits: Commits
    compiled: int = 0
    notices: Notices = field(default_factory=Notices)
    directory: Path | None = None
    recorder: Recorder | None = None
    step: int = NOTHING
    last: Mapping[str, Any] | None = None
    links: Links = field(default_factory=dict)
    seen: EvaluationProgress = field(default_factory=EvaluationProgress)
    given_up: Callable[[], None] = _nothing

    def went_back(self) -> bool:
        """Whether steps that were recorded are not in the state any more."""
        return self.last is not None and self.step < self.last["step"]

    def enter(self, rounds: Rounds, why: str, text: str) -> Comm:
        """Join the ranks of the next round. Collective: yes.

        Errors:
            NoPlace: there is none; as `JobFailed` where the job has failed, which was told then.
        """
        try:
            comm = rounds.enter(why, text, self.step)
        except JobFailed:
            self.given_up()
            raise
        self.given_up = _nothing
        return comm

    def close_recorder(self) -> None:
        """Close it, if there is one; another is opened where it is wanted."""
        recorder, self.recorder = self.recorder, None
        if recorder is not None:
            recorder.close()

    def carried(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """What the exchange of the round before leaves to the next one."""
        exchange = self.state.exchange
        return exchange.state_dict() if exchange is not None and self.step != NOTHING else None

    def offer(self) -> tuple[int, str]:
        """The step, and a mark that is equal where everything but tensors is."""
        if self.step == NOTHING:
            return NOTHING, ""
        values = json.dumps(dict(self.state.state_dict().values), sort_keys=True, default=str)
        return self.step, hashlib.sha256(values.encode()).hexdigest()

    def round_is_over(self, *, settled: bool) -> None:
        """Ranks have gone or are about to: find out what of the state can be offered to those of the next round.

        Parameters change only after the whole exchange of a step succeeded, so they are those of a step's end. What
        compression still owed on a rank that is gone is lost with it, unless it was `settled` before: then the newest
        commit counts. What was settled is one, should the next round break before its own. A process that never came
        to have the state of the run still has none.
        """
        if settled:
            self.given_up = _nothing  # it ended well
        if self.step == NOTHING:
            return
        if self._owes():
            if settled:
                self.commits.commit(self.state, synchronized=True)
            elif self.commits.step < 0:
                self.step = NOTHING
                return
            else:
                self.commits.restore(self.state)
        self.step = self.state.progress.step

    def _owes(self) -> bool:
        exchange = self.state.exchange
        return exchange is not None and any(map(is_residual, exchange.state_dict()[0]))


def keep(run: RunConfig, task: Task, device: torch.device, info: RankInfo) -> WorkerState:
    """Put the model on its device and make its optimizer; nothing here needs other ranks."""
    train = run.config.train
    model = task.model.to(device)
    compiled = compile_blocks(model) if train.compile else 0
    optimizer = task.optimizer or make_optimizer(task.model, run.config.optimizer)
    bring_state(optimizer)
    samples = dataset_length(task.train_data)
    precision = Precision(run.config.precision, device)
    progress = Progress(samples=samples, data_id=task.data_id)
    horizon = total_steps(train, samples)
    return WorkerState(
        task=task,
        info=info,
        device=device,
        precision=precision,
        state=TrainState(model, optimizer, precision.scaler, progress),
        horizon=horizon,
        schedule=_schedule(task, run, horizon),
        base_lrs=[float(group["lr"]) for group in optimizer.param_groups],
        commits=Commits(run.config.elastic.loss_s),
        compiled=compiled,
    )


def _schedule(task: Task, run: RunConfig, horizon: int) -> Callable[[int], float]:
    if task.schedule is not None:
        return task.schedule
    return factor(run.config.optimizer, horizon) if task.optimizer is None else _constant


def _constant(step: int) -> float:
    return 1.0
