"""State that a process keeps from one round of an elastic job to the next."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hvdtrain.comm.base import Comm
from hvdtrain.config.parse import RunConfig
from hvdtrain.data.loader import training_samples
from hvdtrain.data.mixture import sample_order
from hvdtrain.engine.base import Engine
from hvdtrain.exchange.residuals import is_residual
from hvdtrain.observe.journal import Journal
from hvdtrain.observe.output import Progress as ProgressDisplay
from hvdtrain.observe.sinks import Recorder
from hvdtrain.plan.plan import Plan
from hvdtrain.run_layout import RunLayout
from hvdtrain.runtime.environment import NO_LAUNCHER, STOP_ON_USR1, RankInfo
from hvdtrain.runtime.host import Binding
from hvdtrain.state.exchange_state import ExchangeState
from hvdtrain.state.frozen import find_frozen
from hvdtrain.state.snapshot import Commits
from hvdtrain.state.train_state import Progress, TrainState
from hvdtrain.task.base import Task
from hvdtrain.training.callbacks.group import Callbacks
from hvdtrain.training.loop.bf16_weights import Bf16Weights
from hvdtrain.training.loop.blocks import checkpoint_blocks, compile_blocks
from hvdtrain.training.loop.forward import Precision, autocast_experts
from hvdtrain.training.loop.step_sums import PendingSignals
from hvdtrain.training.start.optimizers import (
    check_own_optimizer,
    lr_schedule,
    make_optimizer,
    move_optimizer_state,
    sparse_only,
    task_schedule,
    total_steps,
    why_not_fused,
)

NOTHING = -1  # the step of a process that has no state to offer


@dataclass
class WorkerState:
    """Everything of a process that does not depend on the other ranks.

    `step`: optimizer steps in this process's state, or in its commit where ranks hold pieces of the state; `NOTHING` if
    that is not the run's.
    `links`: bytes and seconds of measured all-reduces, by the hosts of the ranks.
    """

    plan: Plan
    task: Task  # with its model, which is on `device`
    info: RankInfo  # rank and environment of this process at its start
    device: torch.device
    precision: Precision
    state: TrainState  # of the training, with the exchange of the current or the last round
    horizon: int  # the step at which the schedule ends
    schedule: Callable[[int], float]  # factor on the learning rates by step
    base_lrs: list[float]  # learning rate of each optimizer group at factor 1
    commits: Commits
    compiled: int = 0  # number of compiled blocks of the model
    signals: PendingSignals = field(default_factory=PendingSignals)
    directory: Path | None = None  # run folder as given; None until this process knows it
    recorder: Recorder | None = None  # of this rank; it stays open while the rank leads, or does not lead, as before
    step: int = NOTHING
    last_record: Mapping[str, Any] | None = None  # journal line of the newest step that this process has recorded
    links: dict[tuple[str, ...], list[tuple[int, float]]] = field(default_factory=dict)
    evaluated: int = -1  # the newest evaluated step, or the step at which this process joined; -1 before
    warnings: list[str] = field(default_factory=list)  # about task and optimizer; recorded when training starts
    callbacks: Callbacks = field(default_factory=lambda: Callbacks([]))  # of the run; `session.py` sets them
    note: str = ""  # of the task, about what it has prepared; shown when training starts
    binding: Binding | None = None  # cores of this process; None if they are those of its launcher

    @property
    def resumes_in_job(self) -> bool:
        """Return whether this process continues the run within its job, after an earlier round."""
        return self.step != NOTHING

    def open_recorder(self, run: RunConfig, comm: Comm, layout: RunLayout) -> bool:
        """Keep the recorder of the last round if it still fits, or open a new one; return whether it is new.

        It fits if this process leads (rank 0), or does not lead, as before, and if no recorded step was lost.
        """
        leads = comm.rank == 0
        lost = self.last_record is not None and self.step < self.last_record["step"]
        if self.recorder is not None and self.recorder.is_rank_0 == leads and not lost:
            return False
        self.close_recorder()
        live = self.info.launcher == NO_LAUNCHER
        display = ProgressDisplay(self.task.unit, run.config.observe.line_every_s, live=live, quiet=not leads)
        self.recorder = Recorder(Journal(layout.journal, display.say) if leads else None, display)
        return True

    def close_recorder(self) -> None:
        """Close the recorder, if it is open."""
        recorder, self.recorder = self.recorder, None
        if recorder is not None:
            recorder.close()

    def use_exchange(self, engine: Engine) -> None:
        """Pass the exchange's state of the last round to the engine of a new round; `pool_state` loads pieces."""
        last = self.state.exchange
        if last is not None and not last.in_pieces and self.resumes_in_job:
            engine.load_state_dict(*last.state_dict())
        self.state.exchange = engine

    def offer(self) -> tuple[int, str]:
        """Return the step of the state and a hash of its plain values."""
        if not self.resumes_in_job:
            return NOTHING, ""
        values = json.dumps(dict(self.state.state_dict().values), sort_keys=True, default=str)
        return self.step, hashlib.sha256(values.encode()).hexdigest()

    def end_round(self, *, synchronized: bool) -> None:
        """Determine which state this process can offer to the next round.

        Parameters change only after the whole exchange of a step succeeded, so they are those at a step's end. But the
        residuals on a lost rank are lost with it. Then the newest commit counts, unless the exchange's state was
        `synchronized` first; that state is committed, in case the next round fails before its own first commit.
        A process that never received the run's state has nothing to offer. Where ranks hold pieces of the state, only
        the newest commit counts, and `pool_state` restores it in the next round.

        The buckets and gradients of the round are freed here, before the next round makes new ones.
        """
        self.state.optimizer.zero_grad()
        if self.state.exchange is not None:
            self.state.exchange = ExchangeState(self.state.exchange)
        if not self.resumes_in_job:
            return
        if self.state.exchange is not None and self.state.exchange.in_pieces:
            self.step = self.commits.step
            return
        if self.state.exchange is not None and any(map(is_residual, self.state.exchange.state_dict()[0])):
            if synchronized:
                self.commits.commit(self.state, synchronized=True)
            elif self.commits.step < 0:
                self.step = NOTHING
                return
            else:
                self.commits.restore(self.state)
        self.step = self.state.progress.step


def make_worker_state(run: RunConfig, plan: Plan, task: Task, device: torch.device, info: RankInfo) -> WorkerState:
    """Move the model to its device, unless the engine does, and make its optimizer. Needs no other rank."""
    train = run.config.train
    frozen = find_frozen(task.model) if task.remakes_frozen else None
    model = task.model if plan.places_model else task.model.to(device)
    if run.config.precision != "fp32":
        autocast_experts(model)
    checkpoint_blocks(model, run.config.memory.checkpointing)
    compiled = compile_blocks(model, without_hooks=plan.dimensions.pp > 1) if train.compile else 0
    may_fuse = not plan.bits or (device.type != "cpu" and not plan.offload)
    optimizer = task.optimizer or make_optimizer(task.model, run.config.optimizer, may_fuse=may_fuse)
    warnings = []
    if task.optimizer is not None:
        check_own_optimizer(task.optimizer, model, may_fuse=may_fuse)
    elif optimizer.defaults.get("fused") is False and may_fuse:
        named = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
        reason = why_not_fused(named, sparse_only(model))
        warnings.append(f"the update of the parameters takes longer: {reason}")
    move_optimizer_state(optimizer)
    samples = training_samples(task.train_data)
    precision = Precision(run.config.precision, device, Bf16Weights(model) if plan.copies_weights else None)
    progress = Progress(samples=samples, data_id=task.data_id)
    horizon = total_steps(train, sample_order(task.train_data, samples, run.config.seed).epoch_samples)
    if task.schedule is not None:
        schedule = task_schedule(task.schedule, horizon)
    else:
        schedule = lr_schedule(run.config.optimizer, horizon) if task.optimizer is None else lambda step: 1.0
    return WorkerState(
        plan=plan,
        task=task,
        info=info,
        device=device,
        precision=precision,
        state=TrainState(model, optimizer, precision.scaler, progress, frozen=frozen),
        horizon=horizon,
        schedule=schedule,
        base_lrs=[float(group["lr"]) for group in optimizer.param_groups],
        commits=Commits(run.config.elastic.loss_s),
        compiled=compiled,
        warnings=warnings,
        signals=PendingSignals(stop_on_usr1=info.variables.get(STOP_ON_USR1) == "1"),
    )
