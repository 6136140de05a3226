"""The training loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hvdtrain.comm.base import Comm
from hvdtrain.comm.rounds import CHANGED as RANKS_CHANGE
from hvdtrain.comm.rounds import Rounds
from hvdtrain.config.schema import Config
from hvdtrain.errors import TaskError
from hvdtrain.observe.histograms import Histograms
from hvdtrain.runtime.clock import steady_s
from hvdtrain.state.train_state import TrainState
from hvdtrain.training.diagnostics.step_checks import StepChecks
from hvdtrain.training.elastic.roll_back import RollBack
from hvdtrain.training.loop.feed import Feed
from hvdtrain.training.loop.notices import CHANGED, COUNT, SAVE, TERMINATE, Notices, stop_reason
from hvdtrain.training.loop.saving import Saving
from hvdtrain.training.loop.step import Stepper, StepResult


class Observer(Protocol):
    """Told of a run as it happens."""

    def begin_step(self, step: int) -> None:
        """Step `step`, counted from 1, is about to be done."""
        ...

    def step(self, record: dict[str, Any]) -> None:
        """Take what the journal holds of a step."""
        ...

    def event(self, record: dict[str, Any]) -> None:
        """Take what the journal holds of an event."""
        ...

    def show(self, record: dict[str, Any]) -> None:
        """Take an event that is too large for the journal."""
        ...


class Live(Protocol):
    """What is asked of a run from outside while it trains."""

    def notices(self) -> list[int]:
        """Numbers that the step that comes sums over ranks."""
        ...

    def agreed(self, step: int, notices: Sequence[int]) -> None:
        """Act on the sums of step `step`, which every rank has now. Collective: yes."""
        ...


@dataclass
class Trainer:
    """Trains from `state` to step `stop`.

    ::

        evaluate
        for step in progress.step .. stop:
            set the learning rate of the step
            for each micro-batch of this rank: forward, scaled backward      (Stepper)
            finish exchange; unscale; finite? clip; step                     (Stepper)
            position += global batch
            tell the observer; look at what was skipped, and at jumps of the loss    (Sanity)
            where these have spoiled training: back to the last commit, and on past them    (RollBack)
            every N steps, the last step, unless a signal asks to stop: evaluate
            a signal on any rank, every M steps, the last step: save; stop if asked to
            ranks that come or go: make what the exchange carries equal, and leave

    Every rank runs the same lines; only the store is rank 0's. A save is a copy in memory, written while training goes
    on; that of the last step, or of a stop, is waited for.

    Attributes:
        config: the options.
        comm: the ranks.
        rounds: say whether ranks are about to change.
        state: where training is; changed.
        stepper: one step.
        feed: this rank's share of the samples.
        schedule: factor on the learning rates by step.
        base_lrs: learning rate of each of the optimizer's groups at factor 1.
        horizon: the step at which the schedule ends.
        stop: the step to stop at, `horizon` or before.
        saving: evaluates and saves.
        observer: told on every rank; it records and shows on rank 0.
        sanity: looks at the numbers of each step.
        roll_back: what becomes of training that was spoiled.
        saw_step: called with each step's line of the journal; it may change how gradients are exchanged.
        live: asked before each step, told of what the ranks agreed on after it.
        last: what the journal holds of the newest step; empty before the first.
    """

    config: Config
    comm: Comm
    rounds: Rounds
    state: TrainState
    stepper: Stepper
    feed: Feed
    schedule: Callable[[int], float]
    base_lrs: list[float]
    horizon: int
    stop: int
    saving: Saving
    observer: Observer
    sanity: StepChecks
    roll_back: RollBack
    saw_step: Callable[[dict[str, Any]], None] = lambda record: None
    live: Live | None = None
    last: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Make what the trainer alone uses."""
        self._histograms = Histograms(self.sanity.warn)

    def run(self, notices: Notices) -> str:
        """Train; why it ended: "finished", "stop_at", a signal's name, or that ranks change. Collective: yes.

        Errors:
            NonFiniteError: too many steps in a row had a loss or gradient that was not finite.
            DriftError: parameters are not equal on all ranks.
        """
        with self.saving.writer.opened():
            return self._run(notices)

    def _run(self, notices: Notices) -> str:
        progress, saving = self.state.progress, self.saving
        begun_at = progress.step

        def came() -> list[int]:
            return self.rounds.notices(notices.take(), CHANGED, TERMINATE)

        asked_at = -1
        if progress.step == 0:
            saving.evaluate()
        elif self.rounds.elastic:
            saving.make_up(self.stop, came)
        self.roll_back.begin(self.state)
        self._begin("round" if self.rounds.elastic else "started")
        while progress.step < self.stop:
            own = [*came(), *(commit := self.roll_back.notices())]
            own[SAVE] += saving.writer.poll()  # a save that failed is tried again by all ranks together
            result = self._step([*own, *(self.live.notices() if self.live else ())])
            if self.live:
                self.live.agreed(progress.step, result.notices[len(own) :])
            offence = self.sanity.check(result, progress)
            if is_back := offence is not None and self.roll_back.go_past(offence, self.state, saving.writer.wait):
                self._begin("rolled_back")
                progress = self.state.progress
            elif any(result.notices[COUNT : COUNT + len(commit)]):
                self.roll_back.commit(self.state)
            if progress.step == begun_at + 1:
                self.state.state_dict()  # an optimizer whose state cannot be saved is better refused now than later
            reason = stop_reason(result.notices)
            last = progress.step == self.stop
            # One signal may reach the ranks in two neighbouring steps: it asks for one save.
            asked = bool(result.notices[SAVE]) and progress.step > asked_at + 1
            if asked:
                asked_at = progress.step
            # A stop by signal leaves no time for an evaluation: mpirun kills one second after SIGTERM.
            evaluating = not (reason or is_back) and saving.evaluates(progress.step, self.stop)
            evaluated = saving.evaluate() if evaluating else None
            if asked or reason or (not is_back and saving.saves(progress.step, self.stop)):
                why = f"asked for by {reason or 'SIGUSR1'}" if reason or asked else ""
                saving.save(evaluated, wait=bool(reason) or last, urgent=bool(reason), why=why, notices=came)
            if reason:
                return self._end(reason)
            if result.notices[CHANGED] and not last:
                self.stepper.engine.synchronize_state()
                return RANKS_CHANGE
        return self._end("finished" if progress.step >= self.horizon else "stop_at")

    def _end(self, reason: str) -> str:
        # At once, before loader processes are waited for: a launcher that has sent SIGTERM does not wait long.
        self._event("finished" if reason == "finished" else "stopped", reason=reason)
        self._set_lr(1.0)  # as the task gave them, should it train again
        return reason

    def _begin(self, why: str) -> None:
        self.feed.begin(self.state.progress, self.stop, why)
        self.sanity.stream = self.feed.stream

    def _step(self, notices: list[int]) -> StepResult:
        progress, spans = self.state.progress, self.stepper.spans
        self.observer.begin_step(progress.step + 1)
        spans.step = progress.step + 1
        start_ns = spans.now()
        lr_factor = self._lr_factor(progress.step)
        self._set_lr(lr_factor)
        mine = self.feed.micro_batches(progress.position)
        parts = self.rounds.guard_parts(self.feed.draw(mine, progress.step + 1))
        result = self.stepper.run(parts, len(mine), notices)
        progress.step += 1
        progress.position = self.feed.stream.position_after(progress.position)
        progress.skipped_in_row = 0 if result.applied else progress.skipped_in_row + 1
        progress.skipped += not result.applied
        progress.lr = self.base_lrs[0] * lr_factor
        spans.record("step", start_ns)
        self._observe_step(result, progress.lr, (spans.now() - start_ns) * 1e-9)
        self._observe_values()
        return result

    def _lr_factor(self, step: int) -> float:
        factor = float(self.schedule(step))  # numpy's numbers are not JSON's
        if not 0 <= factor * self.base_lrs[0] < math.inf:
            raise TaskError(
                f"the learning rate of step {step + 1} makes no sense",
                expected="a factor of 0 or more by the schedule, times a finite learning rate",
                found=f"factor {factor}, learning rate {self.base_lrs[0]}",
            )
        return factor

    def _set_lr(self, lr_factor: float) -> None:
        for group, base in zip(self.state.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = base * lr_factor

    def _observe_step(self, result: StepResult, lr: float, step_s: float) -> None:
        seconds = self.stepper.spans.take()
        self.last = {
            "step": self.state.progress.step,
            "time": steady_s(),
            "loss": result.loss,
            "lr": lr,
            "grad_norm": result.grad_norm,
            "position": self.state.progress.position,
            "tokens": result.weight,
            "step_s": step_s,
            "data_s": seconds.get("data", 0.0),
            "copy_s": seconds.get("copy", 0.0),
            "forward_s": seconds.get("forward", 0.0),
            "backward_s": seconds.get("backward", 0.0),
            "exposed_comm_s": seconds.get("wait", 0.0),
            "clip_s": seconds.get("clip", 0.0),
            "optimizer_s": seconds.get("optimizer", 0.0),
            "skipped": not result.applied,
        }
        self.observer.step(self.last)
        self.saw_step(self.last)

    def _observe_values(self) -> None:
        every, step = self.config.observe.histograms_every, self.state.progress.step
        if every and step % every == 0 and self.comm.rank == 0:
            self.observer.show({"event": "histograms", "at_step": step, **self._histograms.summaries(self.state.model)})

    def _event(self, event: str, **facts: Any) -> None:
        self.observer.event({"event": event, "at_step": self.state.progress.step, **facts})
