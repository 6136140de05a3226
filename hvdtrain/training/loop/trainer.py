"""The training loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from hvdtrain.comm.rounds import CHANGED as RANKS_CHANGE
from hvdtrain.errors import TaskError
from hvdtrain.runtime.clock import steady_s
from hvdtrain.spans import JOURNAL_KEYS, Spans
from hvdtrain.training.callbacks.base import Training
from hvdtrain.training.diagnostics.second_rank import SecondRank
from hvdtrain.training.diagnostics.step_checks import StepChecks
from hvdtrain.training.elastic.roll_back import RollBack
from hvdtrain.training.loop.balance import Balance
from hvdtrain.training.loop.feed import Feed
from hvdtrain.training.loop.saving import Saving
from hvdtrain.training.loop.step import Stepper
from hvdtrain.training.loop.step_sums import CHANGED, COUNT, SAVE, TERMINATE, PendingSignals, StepSums, stop_reason
from hvdtrain.training.loop.update import StepResult
from hvdtrain.training.loop.worker_steps import WorkerSteps
from hvdtrain.training.records.memory import memory_by_kind
from hvdtrain.training.round import Round


@dataclass
class TimedStep:
    """A step's number, counted from 1, its learning rate, and its times."""

    step: int
    lr: float
    start_ns: int
    end_position: int  # of the stream, after the step
    end_ns: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)  # by the name of the span

    def end(self, spans: Spans) -> None:
        """Note that it is over, unless more work of this step follows; then call it again."""
        before, found = self.seconds, spans.pop_seconds()
        self.seconds = {**before, **{name: s + before.get(name, 0.0) for name, s in found.items()}} if before else found
        self.end_ns = spans.now()

    def record(self, spans: Spans) -> None:
        """Record its span, before those of later steps."""
        spans.record("step", self.start_ns, end_ns=self.end_ns, step=self.step)


@dataclass
class Trainer:
    """Trains from the state of a round to its last step.

    ::

        evaluate
        for step in progress.step .. stop, or until a callback asks to stop:
            set the learning rate of the step
            for each micro-batch of this rank: forward, scaled backward      (Stepper)
            finish exchange; unscale; finite? clip; step                     (Stepper)
            position += global batch
            record the step; callbacks; check skipped steps and jumps of the loss       (StepChecks)
            if they have spoiled training: back to the last commit           (RollBack)
            every N steps, last step, unless a signal asks to stop: evaluate
            a signal on any rank, every M steps, the best evaluation, last step: save; stop if asked to
            if ranks join or leave: synchronize the exchange's state, and return

    Every rank runs the same lines; only the store is rank 0's. A save is a copy in memory, written while training
    continues. The trainer waits for the save of the last step, or of a stop.
    """

    current: Round  # the round, with the state to train and the recorder
    stepper: Stepper
    feed: Feed
    saving: Saving
    step_checks: StepChecks
    roll_back: RollBack
    on_step: Callable[[dict[str, Any]], None]  # called with each step's journal line; it may change the compression
    sums: StepSums  # further integers that each step sums over ranks
    apart: WorkerSteps | None = None  # runs the steps of workers that train apart; None without such workers
    second: SecondRank | None = None  # repeats micro-batches of other ranks; None if nobody does
    balance: Balance | None = None  # divides the global batch by the speed of ranks; None for equal shares

    def __post_init__(self) -> None:
        """Keep what each step uses."""
        self._worker, self._callbacks = self.current.worker, self.current.worker.callbacks
        self._state = self._worker.state

    def run(self, signals: PendingSignals) -> str:
        """Train; return why training ended. Collective: yes.

        Returns: "finished", "stop_at", the name of a signal, `RANKS_CHANGE`, or the reason of a callback.

        Errors:
            NonFiniteError: too many steps in a row had a loss or gradient that was not finite.
            DriftError: parameters are not equal on all ranks.
        """
        with self.saving.writer.opened():
            reason = self._run(signals)
            self.stepper.engine.complete()
        if reason != RANKS_CHANGE:
            self.saving.finish_copies(urgent=reason in ("SIGTERM", "SIGINT"))
        return reason

    def _run(self, signals: PendingSignals) -> str:
        progress, saving = self._state.progress, self.saving
        is_first = True

        def requests() -> list[int]:
            return self.current.rounds.requests(signals.pop(), CHANGED, TERMINATE)

        asked_at = -1
        engine, comm, device = self.stepper.engine, self.current.comm, self._worker.device
        self._callbacks.begin(Training(self._state, engine, comm, self.current, device, saving.measure), comm)
        if progress.step == 0:
            saving.evaluate()
        elif self.current.rounds.elastic:
            saving.catch_up(requests)
        self.roll_back.begin(self._state)
        self.feed.begin(progress, self.current.stop, "round" if self.current.rounds.elastic else "started")
        while progress.step < self.current.stop:
            own = [*requests(), *(commit := self.roll_back.values())]
            own[SAVE] += saving.poll()  # all ranks together retry a failed save
            spoiled = None
            for result in self._steps([*own, *self.sums.values()]):
                if result.sums:
                    self.sums.on_sums(progress.step, result.sums[len(own) :])
                spoiled = spoiled or self.step_checks.check(result, progress)
            if is_back := spoiled is not None and self.roll_back.roll_back(spoiled, self._state, saving.writer.wait):
                progress = self._state.progress
                self.feed.begin(progress, self.current.stop, "rolled_back")
            elif any(result.sums[COUNT : COUNT + len(commit)]):
                self.roll_back.commit(self._state)
            if is_first:
                is_first = False
                self._state.state_dict()  # an optimizer with unsavable state fails now, not at the first save
                self._show_memory()
            reason = stop_reason(result.sums)
            # One signal may reach the ranks in two neighbouring steps: it asks for one save.
            asked = bool(result.sums[SAVE]) and progress.step > asked_at + 1
            if asked:
                asked_at = progress.step
            # A stop by signal leaves no time for an evaluation: mpirun kills one second after SIGTERM.
            evaluating = not (reason or is_back) and saving.is_evaluation_due()
            evaluated = saving.evaluate() if evaluating else None
            last = progress.step == self.current.stop
            is_best = saving.is_best(evaluated)
            if asked or reason or is_best or (not is_back and saving.is_save_due()):
                why = f"requested by {reason or 'SIGUSR1'}" if reason or asked else ""
                saving.save(evaluated, wait=bool(reason) or last, urgent=bool(reason), why=why, requests=requests)
            if reason:
                return self._end(reason)
            if result.sums[CHANGED] and not last:
                self.stepper.engine.residuals.synchronize_state()
                self.roll_back.end_round(self._state)
                return RANKS_CHANGE
        done = "finished" if progress.step >= self._worker.horizon else "stop_at"
        return self._end(self._callbacks.why or done)

    def _end(self, reason: str) -> str:
        # At once, before loader processes end: a launcher that has sent SIGTERM does not wait long.
        self._show_memory()
        event = "finished" if reason in ("finished", self._callbacks.why) else "stopped"
        self.current.recorder.event({"event": event, "at_step": self._state.progress.step, "reason": reason})
        reporter = self.current.reporter
        if reporter is not None and reason in ("SIGTERM", "SIGINT") and self._worker.info.launcher == "openmpi":
            job = reporter.job  # mpirun kills in a second
            by = "Ctrl-C or SIGTERM, as mpirun makes one of both" if reason == "SIGTERM" else "Ctrl-C"
            self.current.recorder.say(f"stopped by {by}; run folder {job.run_dir}; to resume: {job.resume}")
        if reason not in ("SIGTERM", "SIGINT"):  # with little time left, no exchange delays the callbacks
            self.stepper.engine.residuals.synchronize_state()  # the program's model gets exact parameters
        self._callbacks.on_end(reason)
        self._set_lr(1.0)  # the task's own values, in case it trains again
        return reason

    def _steps(self, values: list[int]) -> Iterator[StepResult]:
        """Train until the ranks agree: a step, or several of workers that train apart. Yield the result of each.

        The progress is that of the yielded step. The last result has the sums of `values`. Collective: yes.
        """
        if self.apart is not None and self.apart.begin(self._state.progress.step):
            yield from self._steps_apart(self.apart, values)
            return
        progress = self._state.progress
        share = next(self.feed.shares)
        mine, repeated = share.batches, share.repeated
        timed = self._begin_step(progress.step + 1, share.end)
        parts = self.current.rounds.guard_parts(self.feed.draw(mine, progress.step + 1, repeated))
        positions = share.positions if self._worker.plan.bits else None
        run = partial(self.stepper.run, count=len(mine), values=values, extra=len(repeated), positions=positions)
        if self.second is None:
            result = run(parts)
        else:
            stream = replace(self.feed.stream, data_state=progress.data_state)
            result = self.second.checked(run, parts, self.stepper, stream, progress.position)
        timed.end(self.stepper.spans)
        timed.record(self.stepper.spans)
        if self.balance is not None:
            self.balance.add_step(timed.seconds, len(mine))
        self._record_step(result, timed)
        yield result

    def _steps_apart(self, apart: WorkerSteps, values: list[int]) -> Iterator[StepResult]:
        progress, spans = self._state.progress, self.stepper.spans
        step, position = progress.step, progress.position
        all_timed: list[TimedStep] = []
        for _ in range(apart.engine.steps_apart(self.current.stop - step)):
            if all_timed:
                all_timed[-1].record(spans)
            step += 1
            by_worker = self.feed.stream.by_worker(position)
            position = self.feed.stream.position_after(position)
            timed = self._begin_step(step, position)
            mine = [batch for batches in by_worker for batch in batches]
            parts = self.current.rounds.guard_parts(self.feed.draw(mine, step))
            apart.step(parts, [len(batches) for batches in by_worker])
            timed.end(spans)
            all_timed.append(timed)
        results, outer = apart.agree(step, values)
        all_timed[-1].end(spans)
        all_timed[-1].record(spans)
        for result, timed in zip(results, all_timed, strict=True):
            self._record_step(result, timed)
            yield result
        for facts in outer:
            self.current.recorder.event({"event": "outer_step", **facts})

    def _begin_step(self, step: int, end_position: int) -> TimedStep:
        spans = self.stepper.spans
        self.current.recorder.begin_step(step)
        spans.step = step
        start_ns = spans.now()
        lr_factor, base_lr = self._worker.schedule(step - 1), self._worker.base_lrs[0]
        if not 0 <= lr_factor * base_lr < math.inf:
            raise TaskError(
                f"invalid learning rate at step {step}",
                expected="a schedule factor >= 0, times a finite learning rate",
                found=f"factor {lr_factor}, learning rate {base_lr}",
            )
        self._set_lr(lr_factor)
        return TimedStep(step, base_lr * lr_factor, start_ns, end_position)

    def _set_lr(self, lr_factor: float) -> None:
        for group, base in zip(self._state.optimizer.param_groups, self._worker.base_lrs, strict=True):
            group["lr"] = base * lr_factor

    def _record_step(self, result: StepResult, timed: TimedStep) -> None:
        progress = self._state.progress
        progress.step += 1
        progress.position = timed.end_position
        progress.skipped_in_row = 0 if result.applied else progress.skipped_in_row + 1
        progress.skipped += not result.applied
        progress.lr = timed.lr
        record: dict[str, Any] = {
            "step": progress.step,
            "time": steady_s(),
            "loss": result.loss,
            "lr": timed.lr,
            "grad_norm": result.grad_norm,
            "position": progress.position,
            "tokens": result.weight,
            "step_s": (timed.end_ns - timed.start_ns) * 1e-9,
            **{key: timed.seconds.get(part, 0.0) for part, key in JOURNAL_KEYS.items()},
            "skipped": not result.applied,
        }
        if result.passes:
            record["passes"] = result.passes
        self._worker.last_record = record
        self.current.recorder.step(record)
        self._callbacks.on_step(record)
        self.on_step(record)  # may clear gradients

    def _show_memory(self) -> None:
        found = memory_by_kind(self._worker.device, self._state.model, self.stepper.engine)
        self.current.recorder.event({"event": "memory", "at_step": self._state.progress.step, **found})
