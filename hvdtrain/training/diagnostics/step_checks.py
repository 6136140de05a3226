"""What the numbers of a step lead to: a skipped step is told, looked into and counted; a loss that jumps is told."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.data.loader import Stream
from hvdtrain.errors import NonFiniteError
from hvdtrain.state.train_state import Progress
from hvdtrain.training.diagnostics.loss_spikes import KEEP, spike
from hvdtrain.training.diagnostics.step_replay import Finding, Replayed, replay
from hvdtrain.training.elastic.roll_back import SpoiledSteps, began_at
from hvdtrain.training.loop.step import Stepper, StepResult

_REPLAYS = 3
"""Rows of skipped steps that are looked into: each look costs a step or two."""

_NEXT = {
    "input": "look at these samples of the data set, or leave them out",
    "parameter": "look at what made it so: go on from an earlier checkpoint with a lower --optimizer.lr",
}
_NOTHING = (
    "done again, each rank's part of it is finite: the sum over ranks overflowed, or a kernel does not compute the same"
    " twice (--train.deterministic true)"
)
_NEXT_OTHERWISE = "lower --optimizer.lr, raise --optimizer.warmup_steps, or try --precision fp32"


@dataclass
class StepChecks:
    """Looks at each step's result, which is equal on all ranks.

    Attributes:
        stepper: of the training.
        stream: of the training.
        max_skipped: steps in a row after which the run ends.
        event: takes what the journal holds of an event.
        warn: takes a line for a person.
    """

    stepper: Stepper
    stream: Stream
    max_skipped: int
    event: Callable[[dict[str, Any]], None]
    warn: Callable[[str], None]
    _replays: int = field(default=0, init=False)
    _found: Finding | None = field(default=None, init=False)

    def check(self, result: StepResult, progress: Progress) -> SpoiledSteps | None:
        """Look at the step that `progress` has just counted; what spoiled training, if anything. Collective: yes."""
        if result.applied:
            return self._watch(result.loss, progress)
        overflow = math.isfinite(result.loss) and self.stepper.precision.scaler.is_enabled()
        reason = _reason(result, overflow)
        self._event("skipped_step", progress, positions=self._positions(progress), reason=reason)
        ends = progress.skipped_in_row >= self.max_skipped
        # Overflows at first are how fp16 finds its scale.
        new = progress.skipped_in_row == 1 and not overflow and self._replays < _REPLAYS
        if (new or ends) and result.weight > 0:
            self._replays += 1
            with self.stepper.spans("replay"):
                found = replay(self.stepper, self.stream, self._positions(progress)[0], result.scale)
            self._tell(found, progress, reason)
        if not ends:
            return None
        row = progress.skipped_in_row
        positions = [began_at(progress, row * self.stream.global_batch), progress.position]
        return SpoiledSteps("non_finite", progress.step - row + 1, positions, self._error(result, progress))

    def _watch(self, loss: float, progress: Progress) -> SpoiledSteps | None:
        expected = spike(progress.losses, loss)
        if expected is not None:
            first, end = self._positions(progress)
            self._event("loss_spike", progress, loss=loss, expected=expected, positions=[first, end])
            self.warn(
                f"the loss jumped to {loss:.4g} at step {progress.step}, from about {expected:.4g}; samples at"
                f" positions {first} to {end - 1}"
            )
        progress.losses = [*progress.losses[1 - KEEP :], loss]  # a new list: a snapshot may hold the old one
        return SpoiledSteps("spikes", progress.step, self._positions(progress)) if expected is not None else None

    def _tell(self, found: Replayed, progress: Progress, reason: str) -> None:
        """One event and one line for what all ranks found."""
        first = found.findings[0] if found.findings else None
        self._found = first or self._found
        failures = {str(rank): text for rank, text in found.failures.items()}
        facts = first.facts() if first else {"kind": "unknown", "positions": self._positions(progress)}
        also = [other.rank for other in found.findings[1:]]
        self._event("not_finite", progress, **facts, also_ranks=also, failures=failures)
        text = str(first or _NOTHING)
        text += f"; on rank(s) {', '.join(map(str, also))} too" if also else ""
        text += "".join(f"; rank {rank} could not do it again: {failure}" for rank, failure in failures.items())
        self.warn(f"step {progress.step} was skipped ({reason}): {text}")

    def _error(self, result: StepResult, progress: Progress) -> NonFiniteError:
        first, end = self._positions(progress)
        if not result.weight > 0:
            return NonFiniteError(
                f"the weight of the global batch was not positive {progress.skipped_in_row} steps in a row",
                expected="a global batch in which the task's loss function counts samples or tokens",
                found=f"weight {result.weight:g} at step {progress.step}, samples at positions {first} to {end - 1}",
                next_step="look at the weight that the loss function returns beside the loss, and at what it masks",
            )
        found = f"loss {result.loss}, gradient norm {result.grad_norm} at step {progress.step}, samples at positions"
        found += f" {first} to {end - 1}"
        return NonFiniteError(
            f"the loss or the gradient was not finite {progress.skipped_in_row} steps in a row",
            found=f"{found}; {self._found}" if self._found else found,
            next_step=_NEXT.get(self._found.origin.kind if self._found else "", _NEXT_OTHERWISE),
        )

    def _positions(self, progress: Progress) -> list[int]:
        return [began_at(progress, self.stream.global_batch), progress.position]

    def _event(self, event: str, progress: Progress, **facts: Any) -> None:
        self.event({"event": event, "at_step": progress.step, "step": progress.step, **facts})


def _reason(result: StepResult, overflow: bool) -> str:
    if not result.weight > 0:
        return "the weight of the global batch is not positive"
    if overflow:
        return f"gradient overflow at scale {result.scale:g}"
    return "gradient not finite" if math.isfinite(result.loss) else "loss not finite"
