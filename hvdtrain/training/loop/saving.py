"""Evaluations and checkpoints during training, and the last checkpoint, which must be written."""

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
from hvdtrain.training.loop.step import Stepper
from hvdtrain.training.loop.step_sums import COUNT, stop_reason

WAITS_S = (1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0, 60.0, 60.0)
"""Waits between tries to write the last checkpoint, in which a person can make room on the disk."""

_TICK_S = 0.25
"""How often waiting ranks check for a signal; mpirun kills 1 s after SIGTERM."""


@dataclass
class EvaluationProgress:
    """The newest evaluated step, kept from round to round.

    Attributes:
        step: the newest evaluated step, or the step at which this process joined; -1 before.
    """

    step: int = -1


@dataclass
class Saving:
    """Evaluates and saves.

    Attributes:
        config: the options.
        comm: the ranks.
        state: to evaluate and save.
        stepper: of the training.
        store: on rank 0; None elsewhere.
        ledger: synced to the disk before each checkpoint.
        roll_back: takes a commit with each checkpoint.
        event: records an event in the journal.
        warn: shows a warning.
        evaluations: the newest evaluated step.
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
    evaluations: EvaluationProgress = field(default_factory=EvaluationProgress)
    writer: CheckpointWriter = field(init=False)
    held_out: HeldOut = field(init=False)

    def __post_init__(self) -> None:
        """Make the writer and this rank's share of the held-out samples."""
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
        """Evaluate on held-out samples, if there are any. Collective: yes."""
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
        self.evaluations.step = self.state.progress.step
        return found

    def catch_up(self, stop: int, requests: Callable[[], list[int]]) -> None:
        """Do the evaluation and the save due at this step, if a lost rank prevented them. Collective: yes."""
        step = self.state.progress.step
        unsaved, unevaluated = self._is_unsaved(stop), self._is_unevaluated(stop)
        evaluated = self.evaluate() if unevaluated or (unsaved and self.evaluates(step, stop)) else None
        if unsaved:
            self.save(evaluated, wait=step == stop, requests=requests)
        self.evaluations.step = step

    def save(
        self,
        evaluation: Evaluation | None,
        *,
        wait: bool,
        urgent: bool = False,
        why: str = "",
        requests: Callable[[], list[int]] = lambda: [0] * COUNT,
    ) -> None:
        """Save the state while training continues; with `wait`, return when it is on the disk. Collective: yes.

        Args:
            evaluation: of this step.
            wait: for the last checkpoint, which must be written. It is retried after each of `WAITS_S`; if a signal
                asks to stop, once more at once.
            urgent: little time is left: try once.
            why: what asked for it, if anything did.
            requests: returns the requests that reached this rank since the last call.

        Errors:
            CheckpointError: it cannot be written, with `wait`.
            DriftError: parameters, or buffers that are only checked, are not equal on all ranks.
        """
        with self.stepper.spans("checkpoint"):
            self.ledger.sync()
            self.stepper.buffers.share(check_equal(self.state.model, self.comm, name="drift"))
            self.stepper.engine.synchronize_state()
            # First: if a rank is lost now, nothing on the disk is newer than the commit.
            self.roll_back.commit(self.state, synchronized=True)
            state = self.state.state_dict()
            check_dtypes(state)  # waiting would not help
            heldout_loss = evaluation.loss if evaluation and math.isfinite(evaluation.loss) else None
            notes = {"heldout_loss": heldout_loss}
            waits_s = list(WAITS_S if wait and not urgent else ())
            is_stopped = False
            while True:
                try:
                    self.writer.save(self.state.progress.step, state, notes, wait=wait, urgent=urgent, why=why)
                    return
                except CheckpointError as error:  # equal on every rank
                    if not waits_s:
                        if is_stopped and self.store is not None:  # now: the launcher kills soon
                            self.warn(f"{error.what} ({error.found}): the run ends without it")
                        raise
                    if is_stopped := self._is_stopped(error, waits_s.pop(0), requests):
                        waits_s.clear()

    def _is_unsaved(self, stop: int) -> bool:
        """Return whether the checkpoint due at this step is missing. Collective: yes."""
        step = self.state.progress.step
        if not self.saves(step, stop):
            return False

        def is_missing() -> bool:
            assert self.store is not None
            return all(saved.step != step for saved in self.store.list())

        return on_rank_0(self.comm, is_missing, name="owed")

    def _is_unevaluated(self, stop: int) -> bool:
        """Return whether the evaluation due at this step is missing, as far as rank 0 knows. Collective: yes."""
        step = self.state.progress.step
        if not self.evaluates(step, stop):
            return False
        return on_rank_0(self.comm, lambda: 0 <= self.evaluations.step < step, name="unseen")

    def evaluates(self, step: int, stop: int) -> bool:
        """Return whether an evaluation is due after a step, if training ends with step `stop`."""
        return step == stop or _is_multiple(step, self.config.train.eval_every or self.config.checkpoint.every)

    def saves(self, step: int, stop: int) -> bool:
        """Return whether a checkpoint is due after a step, if training ends with step `stop`."""
        return step == stop or _is_multiple(step, self.config.checkpoint.every)

    def _is_stopped(self, error: CheckpointError, wait_s: float, requests: Callable[[], list[int]]) -> bool:
        """Wait `wait_s` seconds, or until a signal asks any rank to stop; return whether one did. Collective: yes."""
        if self.store is not None:
            self.warn(
                f"{error.what} ({error.found}). It is the last checkpoint: make room on the disk; next try in"
                f" {wait_s:.0f} s"
            )
        for _ in range(round(wait_s / _TICK_S)):
            self.stepper.spans.touch()
            time.sleep(_TICK_S)
            reason = stop_reason(self.comm.allreduce(torch.tensor(requests()), name="last/notices").wait().tolist())
            if reason is not None:
                if self.store is not None:
                    self.warn(f"{reason}: trying once more now to write the last checkpoint")
                return True
        return False


def _is_multiple(step: int, every: int) -> bool:
    return bool(every) and step % every == 0
