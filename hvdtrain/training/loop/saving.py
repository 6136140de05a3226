"""Evaluations and checkpoints during training, and the last checkpoint, which must be written."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from hvdtrain.comm.objects import on_rank_0
from hvdtrain.engine.saved_exchange import to_save
from hvdtrain.errors import ETC, CheckpointError, UnwrittenCheckpointError, listed
from hvdtrain.state.background_writer import CheckpointWriter
from hvdtrain.state.checkpoint_store import Measure
from hvdtrain.state.frozen import UnsavedValues
from hvdtrain.state.ledger import Ledger
from hvdtrain.state.store_copier import LAST_S, STOPPED_S
from hvdtrain.state.tensor_file import check_dtypes
from hvdtrain.training.diagnostics.drift import check_equal, check_frozen
from hvdtrain.training.elastic.roll_back import RollBack
from hvdtrain.training.loop.evaluate import Evaluation, HeldOut, evaluate
from hvdtrain.training.loop.shared_buffers import SharedBuffers
from hvdtrain.training.loop.step import Stepper
from hvdtrain.training.loop.step_sums import stop_reason
from hvdtrain.training.round import Round

WAITS_S = (1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0, 60.0, 60.0)
"""Waits between tries to write the last checkpoint, in which a person can make room on the disk."""

_TICK_S = 0.25
"""How often waiting ranks check for a signal; mpirun kills 1 s after SIGTERM."""


@dataclass
class Saving:
    """Evaluates and saves; with each checkpoint, the ledger is synced to the disk, and a commit taken."""

    current: Round
    stepper: Stepper
    ledger: Ledger
    roll_back: RollBack
    buffers: SharedBuffers
    writer: CheckpointWriter = field(init=False)
    held_out: HeldOut = field(init=False)

    def __post_init__(self) -> None:
        """Make the writer and this rank's share of the held-out samples."""
        current, stepper = self.current, self.stepper
        self._config, self._comm, self._store = current.run.config, current.comm, current.store
        self._recorder, self._worker, self._state = current.recorder, current.worker, current.worker.state
        dimensions, uniform = current.worker.plan.dimensions, stepper.engine.uniform_passes
        self.held_out = HeldOut(stepper.task, self._comm, self._config, stepper.device, dimensions, uniform=uniform)
        check_frozen(self._state)  # notes the values at the start
        self._unsaved: UnsavedValues | None = UnsavedValues(self._state.optimizer)
        keep, event, warn = self._config.checkpoint.keep, self._recorder.event, self._recorder.warn
        self._best = Measure.parse(self._config.checkpoint.best)
        self._callbacks = self._worker.callbacks
        copy = current.copier.copy if current.copier is not None else lambda path: None
        self.writer = CheckpointWriter(self._comm, self._store, keep, event, warn, stepper.spans.touch, on_saved=copy)

    def poll(self) -> int:
        """Report what was written and copied since the last step. Return 1 if a retry of a failed save is due."""
        if self.current.copier is not None:
            self.current.copier.report()
        return self.writer.poll()

    def finish_copies(self, *, urgent: bool) -> None:
        """Wait until the last checkpoint is on the store, if there is one. Collective: yes.

        Errors: UnwrittenCheckpointError: it could not be copied, unless `urgent`: then a warning says so.
        """
        if self._config.checkpoint.to is None:
            return

        def finish() -> None:
            assert self.current.copier is not None
            try:
                self.current.copier.finish(STOPPED_S if urgent else LAST_S, self.stepper.spans.touch)
            except UnwrittenCheckpointError as error:
                if not urgent:
                    raise
                self._recorder.warn(f"{error.what} ({error.found}); next: {error.next_step}")

        on_rank_0(self._comm, finish, name="copied")

    def evaluate(self) -> Evaluation | None:
        """Evaluate on held-out samples, if there are any; callbacks may end training. Collective: yes.

        Errors: ConfigError: the value that determines the best checkpoint is missing.
        """
        began_s = time.perf_counter()
        with self.stepper.spans("evaluation"):
            if (found := self.measure()) is not None:
                self._callbacks.on_evaluation(found)
                self._best.check(found.metrics)
        if found is not None:
            facts = {"loss": found.loss, "samples": found.samples, "metrics": found.metrics}
            facts["seconds"] = time.perf_counter() - began_s
            self._recorder.event({"event": "evaluation", "at_step": self._state.progress.step, **facts})
        self._worker.evaluated = self._state.progress.step
        return found

    def is_best(self, found: Evaluation | None) -> bool:
        """Return whether an evaluation of trained parameters is the best of the run: then it is saved. Collective: yes.

        Only where evaluations have their own schedule: else each one is at a save.
        """
        if found is None or not self._state.progress.step or self._config.train.eval_every is None:
            return False

        def is_better() -> bool:  # a callback may have changed the metrics on one rank
            assert self._store is not None
            score = self._best.score(found.loss, found.metrics)
            best = self._store.find_best()
            return score is not None and (best is None or score < best[1])

        return on_rank_0(self._comm, is_better, name="best")

    def measure(self) -> Evaluation | None:
        """Return loss and metrics of the model's present values; None without held-out data. Collective: yes."""
        stepper = self.stepper
        stepper.engine.complete()
        return evaluate(self.held_out, stepper.model, stepper.precision, stepper.spans.touch)

    def catch_up(self, requests: Callable[[], list[int]]) -> None:
        """Do the evaluation and the save due at this step, if a lost rank prevented them. Collective: yes."""
        step = self._state.progress.step

        def is_missing() -> bool:
            assert self._store is not None
            return all(saved.step != step for saved in self._store.list())

        def is_unevaluated() -> bool:  # as far as rank 0 knows
            return 0 <= self._worker.evaluated < step

        unsaved = self.is_save_due() and on_rank_0(self._comm, is_missing, name="owed")
        is_due = self.is_evaluation_due()
        unevaluated = is_due and on_rank_0(self._comm, is_unevaluated, name="unseen")
        evaluated = self.evaluate() if unevaluated or (unsaved and is_due) else None
        if self.is_best(evaluated) or unsaved:
            self.save(evaluated, wait=step == self.current.stop, requests=requests)
        self._worker.evaluated = step

    def save(
        self,
        evaluation: Evaluation | None,
        *,
        wait: bool,
        urgent: bool = False,
        why: str = "",
        requests: Callable[[], list[int]],
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
            self.stepper.engine.complete()
            self.buffers.share(check_equal(self._state.model, self._comm, name="drift"))
            check_frozen(self._state)
            # First: if a rank is lost now, nothing on the disk is newer than the commit.
            self._callbacks.on_checkpoint()
            self.roll_back.commit(self._state)
            state = to_save(self._state, self.stepper.engine, self._comm)
            check_dtypes(state)  # waiting would not help
            self._warn_unsaved()
            heldout_loss = evaluation.loss if evaluation and math.isfinite(evaluation.loss) else None
            metrics = evaluation.metrics.items() if evaluation else ()
            finite = {name: value for name, value in metrics if math.isfinite(value)}
            notes = {"heldout_loss": heldout_loss, "metrics": finite}
            waits_s = list(WAITS_S if wait and not urgent else ())
            is_stopped = False
            while True:
                try:
                    self.writer.save(self._state.progress.step, state, notes, wait=wait, urgent=urgent, why=why)
                    return
                except CheckpointError as error:  # equal on every rank
                    if not waits_s:
                        if is_stopped and self._store is not None:  # now: the launcher kills soon
                            self._recorder.warn(f"{error.what} ({error.found}): the run ends without it")
                        raise
                    if is_stopped := self._is_stopped(error, waits_s.pop(0), requests):
                        waits_s.clear()

    def _warn_unsaved(self) -> None:
        """Name, at the first save, what the optimizer has changed and no checkpoint contains."""
        names = self._unsaved.names() if self._unsaved is not None else []
        self._unsaved = None
        if names:
            self._recorder.warn(
                f"{type(self._state.optimizer).__name__} keeps values that checkpoints do not contain, so that a resume"
                f" starts without them: {listed(names, rest=ETC)}; let it keep tensors"
                " in its state, and numbers in its state or its groups"
            )

    def is_evaluation_due(self) -> bool:
        """Return whether an evaluation is due after the newest step."""
        return self._is_last_or_multiple(self._config.train.eval_every or self._config.checkpoint.every)

    def is_save_due(self) -> bool:
        """Return whether a checkpoint is due after the newest step."""
        return self._is_last_or_multiple(self._config.checkpoint.every)

    def _is_last_or_multiple(self, every: int) -> bool:
        step = self._state.progress.step
        is_multiple = bool(every) and any(each % every == 0 for each in self.stepper.engine.covered(step))
        return is_multiple or step == self.current.stop

    def _is_stopped(self, error: CheckpointError, wait_s: float, requests: Callable[[], list[int]]) -> bool:
        """Wait `wait_s` seconds, or until a signal asks any rank to stop; return whether one did. Collective: yes."""
        if self._store is not None:
            self._recorder.warn(
                f"{error.what} ({error.found}). It is the last checkpoint: make room on the disk; next try in"
                f" {wait_s:.0f} s"
            )
        for _ in range(round(wait_s / _TICK_S)):
            self.stepper.spans.touch()
            time.sleep(_TICK_S)
            summed = self._comm.allreduce(torch.tensor(requests()), name="last/notices").wait()
            reason = stop_reason(summed.tolist())
            if reason is not None:
                if self._store is not None:
                    self._recorder.warn(f"{reason}: trying once more now to write the last checkpoint")
                return True
        return False
