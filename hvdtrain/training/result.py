"""The result of a run: losses, speed, wall time by part."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.comm.objects import on_rank_0
from hvdtrain.observe.cost import cost_of
from hvdtrain.observe.cost import text as cost_text
from hvdtrain.observe.output import duration
from hvdtrain.observe.past_journal import journal_lines, read_journal_starts
from hvdtrain.observe.scalars import BANDS
from hvdtrain.timeline import wording
from hvdtrain.timeline.analysis.analysis import Analysis
from hvdtrain.timeline.analysis.ending import Kept, kept
from hvdtrain.timeline.analysis.goodput import goodput_of
from hvdtrain.training.round import Round
from hvdtrain.training.start.resume_checks import options_to_continue

_LAST = 10  # the loss at the end of a run is the mean over this many steps

_FIGURES = {"step", "loss", "step_s", "tokens"}
REST = "evaluation, checkpoints, rest"
_BUDGET = {
    "data": BANDS["1_data"],
    "forward and backward": (*BANDS["2_forward"], *BANDS["3_backward"]),
    "exposed communication": BANDS["4_exposed_comm"],
    "clipping and optimizer": BANDS["5_optimizer"],
}
"""Parts of a run's wall time, except `REST`, and the parts of a step in each."""


@dataclass(frozen=True)
class Result:
    """The result of a run, equal on all ranks except `model` and `analysis`.

    A stretch of the run is what one start of the job has trained.

    Attributes:
        run_dir: the run folder; absolute.
        reason: "finished", "stop_at", the name of the signal that stopped it, or what a callback gave as
            the reason.
        step: optimizer steps done, including earlier stretches of the run.
        total_steps: the schedule's horizon.
        train_on: options that train for as many steps again, at the last learning rate.
        resumed_at: the step that this stretch started from.
        first_loss: training loss of the run's first step.
        last_loss: mean training loss of its last steps, at most 10.
        first_heldout_loss: of the run's first evaluation; nan if nothing is held out.
        last_heldout_loss: of its last evaluation.
        metrics: the task's metrics in its last evaluation.
        best: the best checkpoint, its step and its value, as one line; empty if nothing is held out.
        tokens_per_s: weight per second over this stretch's steps, without the first, which warms up.
        unit: what the weight counts: tokens, samples.
        seconds: of this stretch's steps.
        sizes: number of ranks in each round of this stretch: one number, unless ranks joined or left.
        still_s: seconds without a step while ranks joined or left, in total.
        budget: this stretch's wall time on rank 0: seconds by part.
        model: the trained model, on this rank's device.
        analysis: where a step's time goes, and which rank is late; on rank 0, if traces were recorded.
        cost: what all starts of the run have used, as one line: money, device-hours, energy; empty if unknown.
        promise: how much later than promised the run ended, as one line; empty if it promised nothing.
        goodput: what their device-hours were used for, as one line; empty if unknown.
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
    best: str = ""
    cost: str = ""
    goodput: str = ""
    promise: str = ""


def read_result(current: Round, reason: str, resumed_at: int, analysis: Analysis | None) -> Result:
    """Return the result of a run that has ended, with the figures of rank 0's journal. Collective: yes."""
    worker, layout = current.worker, current.layout
    figures = on_rank_0(
        current.comm, lambda: {**journal_figures(layout.journal, analysis), **_best(current)}, name="figures"
    )
    return Result(
        run_dir=layout.folder,
        reason=reason,
        step=worker.state.progress.step,
        total_steps=worker.horizon,
        train_on=options_to_continue(current.run.config, worker),
        resumed_at=resumed_at,
        unit=worker.task.unit,
        model=worker.state.model,
        analysis=analysis,
        **nan_for_none(figures),
    )


def _best(current: Round) -> dict[str, str]:
    assert current.store is not None
    if (found := current.store.find_best()) is None:
        return {}
    (saved, score), measure = found, current.store.best
    name = "held-out loss" if measure.name == "loss" else measure.name
    return {
        "best": f"{name} {-score if measure.more else score:.4f} at step {saved.step}: checkpoints/{saved.path.name}"
    }


def journal_figures(journal: Path, analysis: Analysis | None = None) -> dict[str, Any]:
    """Read the figures of a `Result` from a run's journal; None replaces nan, which JSON lacks.

    Reads line by line: the journal of a long run may be larger than the free memory. The goodput is that of the
    analysis, which knows late ranks, if there is one.
    """
    steps = _StepSums()
    for line in journal_lines(journal):
        steps.add(line)
    starts = read_journal_starts(journal)
    begin = max((n for n, start in enumerate(starts) if not start.started.get("goes_on")), default=0)
    evaluated = [event for start in starts for event in start.events_named("evaluation")]
    resumed = [event for start in starts[begin:] for event in start.events_named("resumed")]
    cost, goodput = cost_of(starts), analysis.goodput if analysis is not None else goodput_of(starts)
    return {
        **steps.figures(),
        "first_heldout_loss": evaluated[0]["loss"] if evaluated else None,
        "last_heldout_loss": evaluated[-1]["loss"] if evaluated else None,
        "metrics": nan_for_none(evaluated[-1]["metrics"]) if evaluated else {},
        "sizes": [start.started.get("size", 1) for start in starts[begin:] if start.started],
        "still_s": sum((event.get("without_step_s", 0.0) for event in resumed), 0.0),
        "cost": cost_text(cost) if cost is not None else "",
        "goodput": wording.goodput(goodput, most=1) if goodput is not None else "",
        "promise": "" if (found := kept(starts)) is None else _promise(found),
    }


def _promise(found: Kept) -> str:
    late, where = "late" if found.late_s >= 0 else "early", "inside" if found.is_within else "outside"
    return (
        f"{duration(abs(found.late_s))} {late} ({found.share:+.1%}), {where} the interval promised at step"
        f" {found.at_step:,}"
    )


class _StepSums:
    """Sums over the steps of a run's last stretch, and its first and last losses, in constant memory.

    The wall time is from the begin of the stretch's first step to the last line. So it excludes an evaluation before
    the first step, and includes the checkpoint after the last.
    """

    def __init__(self) -> None:
        self._first: Mapping[str, Any] = {"step": math.inf, "loss": None}
        self._last: deque[tuple[int, float | None]] = deque(maxlen=_LAST)
        self._clear()

    def _clear(self) -> None:
        """Begin a new stretch of the run."""
        self._parts = dict.fromkeys(_BUDGET, 0.0)
        self._seconds: list[float] = []  # of the first step, and of all others together
        self._weights: list[float] = []
        self._begin = self._end = 0.0

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line of the journal. A step that lacks figures, as only an edited journal has it, does not count."""
        is_step = "event" not in line
        if is_step and not line.keys() >= _FIGURES:
            return
        if line.get("event") == "started" and not line.get("goes_on"):
            self._clear()
        self._end = max(self._end, line.get("time", self._end))
        if not is_step:
            return
        if line["step"] <= self._first["step"]:
            self._first = line
        while self._last and self._last[-1][0] >= line["step"]:  # repeated after a roll back
            self._last.pop()
        self._last.append((line["step"], line["loss"]))
        if not self._seconds:
            self._begin = line.get("time", self._end) - line["step_s"]
        for sums, value in ((self._seconds, line["step_s"]), (self._weights, line["tokens"])):
            if len(sums) < 2:
                sums.append(value)
            else:
                sums[1] += value
        for part, of_step in _BUDGET.items():
            self._parts[part] += sum(line.get(f"{each}_s", 0.0) for each in of_step)

    def figures(self) -> dict[str, Any]:
        """Return fields of `Result`. The budget is empty if no step was done."""
        known = [loss for _, loss in self._last if loss is not None]
        seconds = self._seconds[-1] if self._seconds else 0.0
        rest = max(0.0, self._end - self._begin - sum(self._parts.values()))
        return {
            "first_loss": self._first["loss"],
            "last_loss": sum(known) / len(known) if known else None,
            "tokens_per_s": self._weights[-1] / seconds if seconds else None,
            "seconds": sum(self._seconds),
            "budget": {**self._parts, REST: rest} if self._seconds else {},
        }


def nan_for_none(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Replace None by nan."""
    return {name: math.nan if value is None else value for name, value in figures.items()}
