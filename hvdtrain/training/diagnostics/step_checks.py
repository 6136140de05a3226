"""Check each step's result: skipped steps, and jumps of the loss and of the gradient norm.

Change point libraries such as ruptures are not used: a step is judged when it ends, from the steps before it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median as median_of
from typing import Any

from hvdtrain.errors import NonFiniteError
from hvdtrain.state.train_state import Progress
from hvdtrain.training.diagnostics.step_replay import Finding, replay
from hvdtrain.training.elastic.roll_back import SpoiledSteps, first_position
from hvdtrain.training.loop.feed import Feed
from hvdtrain.training.loop.step import Stepper
from hvdtrain.training.loop.update import StepResult
from hvdtrain.training.round import Round

WINDOW = 64  # steps that a value is compared with

_LEAST = 24  # steps before the first report

_DEVIATIONS = 8.0
_SMALLEST = 0.01  # smallest deviation, as a share of the median, so that a curve without noise is not all spikes

_QUIET = 8  # steps without a spike before the next one counts as new

KEEP = WINDOW + _QUIET  # values that `Series.jump` needs

_REPLAYS, _WITHIN = 3, 1000  # largest number of replays within a number of steps; each costs a step or two
_STABLE = 100  # steps at a loss scale; before, an overflow is how fp16 finds its scale
_HALVED = 8  # steps in a row: what is not finite at a small fraction of the scale is no overflow

_NEXT = {
    "input": "check these samples of the data set, or leave them out",
    "parameter": "find out what made it so: resume from an earlier checkpoint with a lower --optimizer.lr",
}
_UNKNOWN = (
    "in a replay, each rank's part is finite: the sum over ranks overflowed, or a kernel is not deterministic"
    " (--train.deterministic true)"
)
_NEXT_OTHERWISE = "lower --optimizer.lr, raise --optimizer.warmup_steps, or try --precision fp32"


class Series:
    """The newest values of applied steps, `KEEP` at most; the last `WINDOW` of them also in their order."""

    def __init__(self, values: Sequence[float] = ()) -> None:
        self.values = list(values)
        self._ordered = sorted(self.values[-WINDOW:])

    def add(self, value: float) -> None:
        """Add a value."""
        if len(self._ordered) == WINDOW:
            del self._ordered[bisect_left(self._ordered, self.values[-WINDOW])]
        insort(self._ordered, value)
        self.values = [*self.values[1 - KEEP :], value]  # a new list: a snapshot may refer to the old one

    def jump(self, value: float) -> float | None:
        """Return the expected value if a value jumped; None if it did not, or if that was already reported.

        A jump is a distance from the median, in median absolute deviations; a few earlier jumps hardly change either.
        If all values are positive, their logarithms must jump too, because they are less skewed than losses of small
        batches.
        """
        expected = _jumped(self._ordered, value)
        if expected is None:
            return None
        for back in range(1, min(_QUIET, len(self.values)) + 1):
            if _jumped(sorted(self.values[-back - WINDOW : -back]), self.values[-back]) is not None:
                return None
        return expected


def _jumped(ordered: Sequence[float], value: float) -> float | None:
    if len(ordered) < _LEAST:
        return None
    median = ordered[len(ordered) // 2]
    least = _SMALLEST * (median if median > 0 else -median)
    if value - median <= _DEVIATIONS * least:  # nearly always
        return None
    found = _stands_out(ordered, median, value, least)
    if found and ordered[0] > 0 and value > 0:
        found = _stands_out([math.log(x) for x in ordered], math.log(median), math.log(value), _SMALLEST)
    return median if found else None


def _stands_out(window: Sequence[float], median: float, value: float, least: float) -> bool:
    # For a normal distribution, the standard deviation is 1.4826 times the median absolute deviation.
    deviation = 1.4826 * median_of([x - median if x > median else median - x for x in window])
    return abs(value - median) > _DEVIATIONS * max(deviation, least)


@dataclass
class StepChecks:
    """Checks each step's result, which is equal on all ranks."""

    current: Round
    stepper: Stepper
    feed: Feed
    _replays: deque[int] = field(default_factory=lambda: deque(maxlen=_REPLAYS), init=False)
    _finding: Finding | None = field(default=None, init=False)
    _scale: tuple[float, int] = field(default=(0.0, 0), init=False)  # the loss scale, and steps at it
    _norms: Series = field(default_factory=Series, init=False)
    _losses: Series = field(default_factory=Series, init=False)

    def check(self, result: StepResult, progress: Progress) -> SpoiledSteps | None:
        """Check the step that `progress` has just counted; return the spoiled steps, if any. Collective: yes."""
        if result.applied:
            scale, steps = self._scale
            self._scale = (result.scale, steps + 1 if result.scale == scale else 1)
            if (usual := self._norms.jump(result.grad_norm)) is not None:
                facts = {"grad_norm": result.grad_norm, "expected": usual, "positions": self._positions(progress)}
                self._event("grad_norm_spike", progress, **facts)
            self._norms.add(result.grad_norm)
            return self._check_loss(result.loss, progress)
        overflow = math.isfinite(result.loss) and self.stepper.precision.scaler.is_enabled()
        reason = _reason(result, overflow)
        self._event("skipped_step", progress, positions=self._positions(progress), reason=reason)
        ends = progress.skipped_in_row >= self.current.run.config.train.max_skipped
        is_expected = overflow and not (self._scale[0] == result.scale and self._scale[1] >= _STABLE)
        is_new = progress.skipped_in_row == (_HALVED if is_expected else 1)
        new = is_new and (len(self._replays) < _REPLAYS or progress.step - self._replays[0] >= _WITHIN)
        engine = self.stepper.engine
        if (new or ends) and result.weight > 0 and not (self.stepper.passes_alone and engine.replayable):
            how = (
                "--parallel.engine horovod, without --parallel.tp, ep, cp and pp, and without nn.SyncBatchNorm: a rank"
                " cannot repeat its passes alone with a part of a model or of a sequence"
            )
            if not engine.replayable:
                how = "--parallel.sync every_step: workers that train apart do not repeat a step"
            self.current.recorder.warn(
                f"step {progress.step} was skipped ({reason}); to find the operation, train these steps with {how}"
            )
        elif (new or ends) and result.weight > 0:
            self._replays.append(progress.step)
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
        if progress.losses is not self._losses.values:  # after a roll back, or at the start
            self._losses = Series(progress.losses)
        expected = self._losses.jump(loss)
        if expected is not None:
            first, end = self._positions(progress)
            self._event("loss_spike", progress, loss=loss, expected=expected, positions=[first, end])
            self.current.recorder.warn(
                f"the loss jumped to {loss:.4g} at step {progress.step}, from about {expected:.4g}; samples at"
                f" positions {first} to {end - 1}"
            )
        self._losses.add(loss)
        progress.losses = self._losses.values
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
