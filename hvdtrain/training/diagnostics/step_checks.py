"""Check each step's result: report and explain skipped steps, and report jumps of the loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hvdtrain.errors import NonFiniteError
from hvdtrain.state.train_state import Progress
from hvdtrain.training.diagnostics.step_replay import Finding, replay
from hvdtrain.training.elastic.roll_back import SpoiledSteps, first_position
from hvdtrain.training.loop.feed import Feed
from hvdtrain.training.loop.step import Stepper, StepResult
from hvdtrain.training.round import Round

_REPLAYS = 3
"""Largest number of replays; each costs a step or two."""

_NEXT = {
    "input": "check these samples of the data set, or leave them out",
    "parameter": "find out what made it so: resume from an earlier checkpoint with a lower --optimizer.lr",
}
_UNKNOWN = (
    "in a replay, each rank's part is finite: the sum over ranks overflowed, or a kernel is not deterministic"
    " (--train.deterministic true)"
)
_NEXT_OTHERWISE = "lower --optimizer.lr, raise --optimizer.warmup_steps, or try --precision fp32"

WINDOW = 64
"""Steps that a loss is compared with."""

_LEAST = 24
"""Steps before the first report."""

_DEVIATIONS = 8.0
_SMALLEST = 0.01
"""Smallest deviation, as a share of the median, so that a curve without noise is not all spikes."""

_QUIET = 8
"""Steps without a spike before the next one counts as new."""

KEEP = WINDOW + _QUIET
"""Losses that `detect_spike` needs."""


@dataclass
class StepChecks:
    """Checks each step's result, which is equal on all ranks."""

    current: Round
    stepper: Stepper
    feed: Feed
    _replays: int = field(default=0, init=False)
    _finding: Finding | None = field(default=None, init=False)

    def check(self, result: StepResult, progress: Progress) -> SpoiledSteps | None:
        """Check the step that `progress` has just counted; return the spoiled steps, if any. Collective: yes."""
        if result.applied:
            return self._check_loss(result.loss, progress)
        overflow = math.isfinite(result.loss) and self.stepper.precision.scaler.is_enabled()
        reason = _reason(result, overflow)
        self._event("skipped_step", progress, positions=self._positions(progress), reason=reason)
        ends = progress.skipped_in_row >= self.current.run.config.train.max_skipped
        # The first overflows are how fp16 finds its scale.
        new = progress.skipped_in_row == 1 and not overflow and self._replays < _REPLAYS
        engine = self.stepper.engine
        if (new or ends) and result.weight > 0 and (engine.uniform_passes or not engine.replayable):
            how = "--parallel.engine horovod: a rank cannot repeat its passes alone with a divided model"
            if not engine.replayable:
                how = "--parallel.sync every_step: workers that train apart do not repeat a step"
            self.current.recorder.warn(
                f"step {progress.step} was skipped ({reason}); to find the operation, train these steps with {how}"
            )
        elif (new or ends) and result.weight > 0:
            self._replays += 1
            with self.stepper.spans("replay"):
                stream = replace(self.feed.stream, data_state=progress.data_state)
                found = replay(self.stepper, stream, self._positions(progress)[0], result.scale)
            self._report(*found, progress, reason)
        if not ends:
            return None
        row = progress.skipped_in_row
        positions = [first_position(progress, row * self.feed.stream.global_batch), progress.position]
        return SpoiledSteps("non_finite", progress.step - row + 1, positions, self._error(result, progress))

    def _check_loss(self, loss: float, progress: Progress) -> SpoiledSteps | None:
        expected = detect_spike(progress.losses, loss)
        if expected is not None:
            first, end = self._positions(progress)
            self._event("loss_spike", progress, loss=loss, expected=expected, positions=[first, end])
            self.current.recorder.warn(
                f"the loss jumped to {loss:.4g} at step {progress.step}, from about {expected:.4g}; samples at"
                f" positions {first} to {end - 1}"
            )
        progress.losses = [*progress.losses[1 - KEEP :], loss]  # a new list: a snapshot may refer to the old one
        return SpoiledSteps("spikes", progress.step, self._positions(progress)) if expected is not None else None

    def _report(self, findings: list[Finding], failed: dict[int, str], progress: Progress, reason: str) -> None:
        """Record one event and show one line for the findings of all ranks."""
        first = findings[0] if findings else None
        self._finding = first or self._finding
        failures = {str(rank): text for rank, text in failed.items()}
        facts = first.facts() if first else {"kind": "unknown", "positions": self._positions(progress)}
        also = [other.rank for other in findings[1:]]
        self._event("not_finite", progress, **facts, also_ranks=also, failures=failures)
        text = str(first or _UNKNOWN)
        text += f"; also on rank(s) {', '.join(map(str, also))}" if also else ""
        text += "".join(f"; the replay on rank {rank} failed: {failure}" for rank, failure in failures.items())
        self.current.recorder.warn(f"step {progress.step} was skipped ({reason}): {text}")

    def _error(self, result: StepResult, progress: Progress) -> NonFiniteError:
        first, end = self._positions(progress)
        where = f"at step {progress.step}, samples at positions {first} to {end - 1}"
        if not result.weight > 0:
            return NonFiniteError(
                f"the weight of the global batch was not positive {progress.skipped_in_row} steps in a row",
                expected="a positive sum of the weights that the task's loss function returns",
                found=f"weight {result.weight:g} {where}",
                next_step="check the weight that the loss function returns, and what it masks",
            )
        found = f"loss {result.loss}, gradient norm {result.grad_norm} {where}"
        return NonFiniteError(
            f"the loss or the gradient was not finite {progress.skipped_in_row} steps in a row",
            found=f"{found}; {self._finding}" if self._finding else found,
            next_step=_NEXT.get(self._finding.origin.kind if self._finding else "", _NEXT_OTHERWISE),
        )

    def _positions(self, progress: Progress) -> list[int]:
        return [first_position(progress, self.feed.stream.global_batch), progress.position]

    def _event(self, event: str, progress: Progress, **facts: Any) -> None:
        self.current.recorder.event({"event": event, "at_step": progress.step, "step": progress.step, **facts})


def _reason(result: StepResult, overflow: bool) -> str:
    if not result.weight > 0:
        return "the weight of the global batch is not positive"
    if overflow:
        return f"gradient overflow at scale {result.scale:g}"
    return "gradient not finite" if math.isfinite(result.loss) else "loss not finite"


def detect_spike(before: Sequence[float], loss: float) -> float | None:
    """Return the expected loss if the loss jumped; None if it did not, or if that was already reported.

    A jump is a distance from the median, in median absolute deviations; a few earlier spikes hardly change either. If
    all losses are positive, their logarithms must jump too, because they are less skewed than losses of small batches.

    Args:
        before: losses of applied steps, the newest last; `KEEP` of them are enough.
        loss: of the next step.
    """
    expected = _jumped(before[-WINDOW:], loss)
    if expected is None:
        return None
    for back in range(1, min(_QUIET, len(before)) + 1):
        if _jumped(before[-back - WINDOW : -back], before[-back]) is not None:
            return None
    return expected


def _jumped(window: Sequence[float], loss: float) -> float | None:
    if len(window) < _LEAST:
        return None
    ordered = sorted(window)
    median = ordered[len(ordered) // 2]
    if loss <= median + _DEVIATIONS * _SMALLEST * abs(median):  # nearly always
        return None
    found = _stands_out(ordered, median, loss, _SMALLEST * abs(median))
    if found and ordered[0] > 0:
        found = _stands_out([math.log(x) for x in ordered], math.log(median), math.log(loss), _SMALLEST)
    return median if found else None


def _stands_out(window: Sequence[float], median: float, loss: float, least: float) -> bool:
    deviations = sorted(abs(x - median) for x in window)
    deviation = 1.4826 * deviations[len(deviations) // 2]  # the standard deviation, for a normal distribution
    return loss - median > _DEVIATIONS * max(deviation, least)
