"""How a run ended."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.observe.journal import read_journal
from hvdtrain.training.budget import budget

_LAST = 10
"""Steps whose mean loss stands for the end of a run."""


@dataclass(frozen=True)
class Result:
    """How a run ended, equal on all ranks but for `model`.

    Attributes:
        run_dir: where everything was written.
        reason: "finished", "stop_at", or the name of the signal that stopped it.
        step: optimizer steps done, earlier stretches of the run included.
        total_steps: the schedule's horizon.
        resumed_at: the step that this stretch started from.
        first_loss: training loss of the run's first step.
        last_loss: mean training loss of its last steps, 10 at most.
        first_heldout_loss: of the run's first evaluation; nan where nothing is held out.
        last_heldout_loss: of its last evaluation.
        metrics: the task's own, of its last evaluation.
        tokens_per_s: weight per second over this stretch's steps but the first, which warms up.
        unit: what was counted: tokens, samples.
        seconds: of this stretch's steps.
        budget: where this stretch's wall time went on rank 0: seconds by part (`training.budget`).
        model: the trained model, on this rank's device.
    """

    run_dir: Path
    reason: str
    step: int
    total_steps: int
    resumed_at: int
    first_loss: float
    last_loss: float
    first_heldout_loss: float
    last_heldout_loss: float
    metrics: Mapping[str, float]
    tokens_per_s: float
    unit: str
    seconds: float
    budget: Mapping[str, float]
    model: Any


def losses_and_speed(journal: Path, resumed_at: int) -> dict[str, Any]:
    """From a run's journal the fields of `Result` that are figures; None for nan, which JSON lacks."""
    lines = read_journal(journal)
    steps = {line["step"]: line for line in lines if "event" not in line}
    ordered = [steps[number] for number in sorted(steps)]
    stretch = [line for line in ordered if line["step"] > resumed_at]
    timed = stretch[1:] or stretch
    seconds = sum(line["step_s"] for line in timed)
    evaluations = [line for line in lines if line.get("event") == "evaluation"]
    return {
        "first_loss": ordered[0]["loss"] if ordered else None,
        "last_loss": _mean([line["loss"] for line in ordered[-_LAST:]]),
        "first_heldout_loss": evaluations[0]["loss"] if evaluations else None,
        "last_heldout_loss": evaluations[-1]["loss"] if evaluations else None,
        "metrics": numbers(evaluations[-1]["metrics"]) if evaluations else {},
        "tokens_per_s": sum(line["tokens"] for line in timed) / seconds if seconds else None,
        "seconds": sum(line["step_s"] for line in stretch),
        "budget": budget(lines),
    }


def numbers(found: Mapping[str, Any]) -> dict[str, Any]:
    """The same with nan for None."""
    return {name: math.nan if value is None else value for name, value in found.items()}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
