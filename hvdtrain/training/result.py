"""How a run ended."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.observe.past_journal import journal_lines
from hvdtrain.timeline.analysis.analysis import Analysis
from hvdtrain.training.records.time_budget import Budget

_LAST = 10
"""Steps whose mean loss stands for the end of a run."""


@dataclass(frozen=True)
class Result:
    """How a run ended, equal on all ranks but for `model` and `analysis`.

    Attributes:
        run_dir: where everything was written; absolute.
        reason: "finished", "stop_at", or the name of the signal that stopped it.
        step: optimizer steps done, earlier stretches of the run included.
        total_steps: the schedule's horizon.
        train_on: options that train for as many steps again, at the learning rate of the end.
        resumed_at: the step that this stretch started from.
        first_loss: training loss of the run's first step.
        last_loss: mean training loss of its last steps, 10 at most.
        first_heldout_loss: of the run's first evaluation; nan where nothing is held out.
        last_heldout_loss: of its last evaluation.
        metrics: the task's own, of its last evaluation.
        tokens_per_s: weight per second over this stretch's steps but the first, which warms up.
        unit: what was counted: tokens, samples.
        seconds: of this stretch's steps.
        sizes: numbers of ranks in the rounds of this stretch: one, unless ranks came or went.
        still_s: for how long their coming and going kept the others from training, in all.
        budget: where this stretch's wall time went on rank 0: seconds by part (`training.budget`).
        model: the trained model, on this rank's device.
        analysis: where a step's time went and which rank is late; on rank 0, and only where traces were recorded.
    """

    run_dir: Path
    reason: str
    step: int
    total_steps: int
    train_on: str
    resumed_at: int
    first_loss: float
    last_loss: float
    first_heldout_loss: float
    last_heldout_loss: float
    metrics: Mapping[str, float]
    tokens_per_s: float
    unit: str
    seconds: float
    sizes: Sequence[int]
    still_s: float
    budget: Mapping[str, float]
    model: Any
    analysis: Analysis | None = None


def losses_and_speed(journal: Path) -> dict[str, Any]:
    """From a run's journal the fields of `Result` that are figures; None for nan, which JSON lacks.

    Takes a line at a time: the journal of a long run may be larger than what memory is left.
    """
    tally = _Tally()
    for line in journal_lines(journal):
        tally.add(line)
    return tally.figures()


class _Tally:
    """What a result needs of a journal's lines, whatever their number."""

    def __init__(self) -> None:
        self._first: Mapping[str, Any] = {"step": math.inf, "loss": None}
        self._last: deque[tuple[int, float | None]] = deque(maxlen=_LAST)
        self._evaluations: list[Mapping[str, Any]] = []
        self._budget = Budget()
        self._clear()

    def _clear(self) -> None:
        """A stretch of the run begins."""
        self._seconds: list[float] = []  # of the first step, and of the others together
        self._weights: list[float] = []
        self._sizes: list[int] = []
        self._still_s = 0.0

    def add(self, line: Mapping[str, Any]) -> None:
        self._budget.add(line)
        if "event" not in line:
            self._add_step(line)
        elif line["event"] == "started":
            if not line.get("goes_on"):
                self._clear()
            self._sizes.append(line.get("size", 1))
        elif line["event"] == "resumed":
            self._still_s += line.get("without_step_s", 0.0)
        elif line["event"] == "evaluation":
            self._evaluations = [*self._evaluations[:1], line]

    def _add_step(self, line: Mapping[str, Any]) -> None:
        if line["step"] <= self._first["step"]:
            self._first = line
        while self._last and self._last[-1][0] >= line["step"]:  # done again since
            self._last.pop()
        self._last.append((line["step"], line["loss"]))
        for sums, value in ((self._seconds, line["step_s"]), (self._weights, line["tokens"])):
            if len(sums) < 2:
                sums.append(value)
            else:
                sums[1] += value

    def figures(self) -> dict[str, Any]:
        """Fields of `Result`."""
        evaluated = self._evaluations
        seconds = self._seconds[-1] if self._seconds else 0.0
        return {
            "first_loss": self._first["loss"],
            "last_loss": _mean([loss for _, loss in self._last]),
            "first_heldout_loss": evaluated[0]["loss"] if evaluated else None,
            "last_heldout_loss": evaluated[-1]["loss"] if evaluated else None,
            "metrics": numbers(evaluated[-1]["metrics"]) if evaluated else {},
            "tokens_per_s": self._weights[-1] / seconds if seconds else None,
            "seconds": sum(self._seconds),
            "sizes": self._sizes,
            "still_s": self._still_s,
            "budget": self._budget.parts(),
        }


def numbers(found: Mapping[str, Any]) -> dict[str, Any]:
    """The same with nan for None."""
    return {name: math.nan if value is None else value for name, value in found.items()}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
