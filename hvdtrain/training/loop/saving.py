"""Keeping what training has come to: evaluations, checkpoints beside it, and the last one, which has to be written."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import on_rank_0
from hvdtrain.config.schema import Config
from hvdtrain.errors import CheckpointError
from hvdtrain.state.background_writer import CheckpointWriter
from hvdtrain.state.checkpoint_store import CheckpointStore
from hvdtrain.state.ledger import Ledger
from hvdtrain.state.tensor_file import check_dtypes
from hvdtrain.state.train_state import TrainState
from hvdtrain.training.diagnostics.health import check_equal
from hvdtrain.training.elastic.roll_back import RollBack
from hvdtrain.training.loop.evaluate import Evaluation, HeldOut, evaluate
from hvdtrain.training.loop.notices import COUNT, stop_reason
from hvdtrain.training.loop.step import Stepper

WAITS_S = (1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0, 60.0, 60.0)
"""Between tries to write the last checkpoint: somebody has so long to make room."""

_TICK_S = 0.25
"""How often the ranks look, while they wait, whether one of them was sent a signal; mpirun kills 1 s after SIGTERM."""


@dataclass
class EvaluationProgress:
    """What a process knows of evaluations, from round to round.

    Attributes:
        step: the newest one that was evaluated, or at which this process came; -1 before.
    """

    step: int = -1


@dataclass
class Saving:
    """Evaluates and saves.

    Attributes:
        config: the options.
        comm: the ranks.
        state: what is saved.
        stepper: of the training.
        store: on rank 0; None elsewhere.
        ledger: on the disk before the checkpoint is.
        roll_back: takes a commit with each checkpoint.
        event: records an event.
        warn: tells something that a person should know.
        seen: of evaluations before this round.
    """

    config: Config
    comm: Comm
    state: TrainState
    stepper: Stepper
    store: CheckpointStore | None
    ledger: Ledger
    roll_back: RollBack
    event: Callable[[dict[str, Any]], None]
    warn: Callable[[str], None]
    seen: EvaluationProgress = field(default_factory=EvaluationProgress)
    writer: CheckpointWriter = field(init=False)
    held_out: HeldOut = field(init=False)

    def __post_init__(self) -> None:
        """Make the writer, and settle who evaluates what."""
        train, stepper = self.config.train, self.stepper
        self.held_out = HeldOut(
            stepper.task,
            self.comm,
            micro_batch=train.micro_batch,
            most=train.eval_samples,
            loader=self.config.loader,
            on_cuda=stepper.device.type == "cuda",
        )
        keep, touch = self.config.checkpoint.keep, self.stepper.spans.touch
        self.writer = CheckpointWriter(self.comm, self.store, keep, self.event, self.warn, touch)

    def evaluate(self) -> Evaluation | None:
        """Look at held-out samples, if there are any. Collective: yes."""
        stepper = self.stepper
        with stepper.spans("evaluation"):
            found = evaluate(
                stepper.task,
                stepper.model,
                self.comm,
                stepper.precision,
                stepper.device,
                self.held_out,
                touch=stepper.spans.touch,
            )
        if found is not None:
            facts = {"loss": found.loss, "samples": found.samples, "metrics": found.metrics}
            self.event({"event": "evaluation", "at_step": self.state.progress.step, **facts})
        self.seen.step = self.state.progress.step
        return found

    def make_up(self, stop: int, notices: Callable[[], list[int]]) -> None:
        """Evaluate and save what is due at this step, where ranks were lost before it was done. Collective: yes."""
        step = self.state.progress.step
        owed, unseen = self._is_owed(stop), self._is_unseen(stop)
        evaluated = self.evaluate() if unseen or (owed and self.evaluates(step, stop)) else None
        if owed:
            self.save(evaluated, wait=step == stop, notices=notices)
        self.seen.step = step

    def save(
        self,
        evaluation: Evaluation | None,
        *,
        wait: bool,
        urgent: bool = False,
        why: str = "",
        notices: Callable[[], list[int]] = lambda: [0] * COUNT,
    ) -> None:
        """Save the state beside training; with `wait`, return when it is on the disk. Collective: yes.

        Args:
            evaluation: of this step.
            wait: it is the last one: it has to be written, and is tried again for as long as `WAITS_S` say, or until
                a signal asks to stop: then once more.
            urgent: little time is left: it is tried once.
            why: it was asked for, where it was.
            notices: what came to this rank since last time.

        Errors:
            CheckpointError: it cannot be written, and was waited for.
            DriftError: parameters are not equal on all ranks, or buffers that are only checked.
        """
        with self.stepper.spans("checkpoint"):
            self.ledger.sync()
            self.stepper.buffers.share(check_equal(self.state.model, self.comm, name="drift"))
            self.stepper.engine.synchronize_state()
            # First: should a rank be lost now, nothing on the disk is newer.
            self.roll_back.commit(self.state, settled=True)
            state = self.state.state_dict()
            check_dtypes(state)  # no waiting helps there
            heldout_loss = evaluation.loss if evaluation and math.isfinite(evaluation.loss) else None
            notes = {"heldout_loss": heldout_loss}
            waits_s = list(WAITS_S if wait and not urgent else ())
            is_stopped = False
            while True:
                try:
                    self.writer.save(self.state.progress.step, state, notes, wait=wait, urgent=urgent, why=why)
                    return
                except CheckpointError as error:  # the same on every rank
                    if not waits_s:
                        if is_stopped and self.store is not None:  # at once: a launcher soon kills
                            self.warn(f"{error.what} ({error.found}): the run ends without it")
                        raise
                    if is_stopped := self._is_stopped(error, waits_s.pop(0), notices):
                        waits_s.clear()

    def _is_owed(self, stop: int) -> bool:
        """Whether the checkpoint that is due at this step is missing. Collective: yes."""
        step = self.state.progress.step
        if not self.saves(step, stop):
            return False

        def is_missing() -> bool:
            assert self.store is not None
            return all(saved.step != step for saved in self.store.list())

        return on_rank_0(self.comm, is_missing, name="owed")

    def _is_unseen(self, stop: int) -> bool:
        """Whether the evaluation that is due at this step is missing, as far as rank 0 was there. Collective: yes."""
        step = self.state.progress.step
        if not self.evaluates(step, stop):
            return False
        return on_rank_0(self.comm, lambda: 0 <= self.seen.step < step, name="unseen")

    def evaluates(self, step: int, stop: int) -> bool:
        """Whether an evaluation is due after a step, of a training that ends with step `stop`."""
        return step == stop or _is_multiple(step, self.config.train.eval_every or self.config.checkpoint.every)

    def saves(self, step: int, stop: int) -> bool:
        """Whether a checkpoint is due after a step, of a training that ends with step `stop`."""
        return step == stop or _is_multiple(step, self.config.checkpoint.every)

    def _is_stopped(self, error: CheckpointError, wait_s: float, notices: Callable[[], list[int]]) -> bool:
        """Wait so long, or until a signal asks any rank to stop; whether one did. Collective: yes."""
        if self.store is not None:
            self.warn(
                f"{error.what} ({error.found}). It is the last one: make room; the next try comes in {wait_s:.0f} s"
            )
        for _ in range(round(wait_s / _TICK_S)):
            self.stepper.spans.touch()
            time.sleep(_TICK_S)
            reason = stop_reason(self.comm.allreduce(torch.tensor(notices()), name="last/notices").wait().tolist())
            if reason is not None:
                if self.store is not None:
                    self.warn(f"{reason}: the waiting is over; the last checkpoint is tried once more, now")
                return True
        return False


def _is_multiple(step: int, every: int) -> bool:
    return bool(every) and step % every == 0
