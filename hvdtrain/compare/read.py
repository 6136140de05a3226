"""Read a run for a comparison, from its journal: its curves over samples and over seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.errors import TraceError
from hvdtrain.observe.cost import Cost, cost_of
from hvdtrain.observe.past_journal import ENDINGS, PastSteps, read_journal_starts
from hvdtrain.run_layout import RunLayout
from hvdtrain.timeline.analysis.ending import Kept, kept
from hvdtrain.timeline.columns import Floats
from hvdtrain.yaml_file import flatten

SAMPLES, SECONDS = "samples", "seconds"
"""Axes of curves."""

LOSS, HELD_OUT = "loss", "heldout_loss"
"""Names of figures; other figures have the names of the task's metrics."""


@dataclass(frozen=True, eq=False)
class Curve:
    """A loss that is constant within each step [n]. Steps do not overlap; nan where it is not finite.

    Positions are in samples, so micro-batch, number of ranks and length of a step do not change where a loss is.
    """

    begins: Floats
    ends: Floats
    values: Floats

    @property
    def usual_length(self) -> float:
        """The median length of a recorded step."""
        lengths = self.ends - self.begins
        return float(np.median(lengths[lengths > 0])) if (lengths > 0).any() else 0.0

    @property
    def first(self) -> float:
        """Where the first recorded step begins: not at 0 if the run began from the state of another run."""
        return float(self.begins[np.argmax(self.ends > self.begins)])

    def mean(self, low: float, high: float) -> float | None:
        """Return the mean from `low` to `high`, by length; None if the curve has nothing there."""
        weights = np.minimum(self.ends, high) - np.maximum(self.begins, low)
        inside = weights > 0
        return float(np.average(self.values[inside], weights=weights[inside])) if inside.any() else None

    def at(self, places: Floats) -> tuple[Floats, NDArray[np.bool_]]:
        """Return the values at places, and whether the curve has them."""
        steps = np.minimum(np.searchsorted(self.ends, places), len(self.ends) - 1)
        return self.values[steps], (places > self.begins[steps]) & (places <= self.ends[-1])


@dataclass(frozen=True, eq=False)
class Points:
    """Evaluations at ascending places [n]."""

    places: Floats
    values: Floats

    def at(self, place: float) -> float | None:
        """Return the value at a place, linear between two evaluations; None outside them."""
        if not self.places[0] <= place <= self.places[-1]:
            return None
        return float(np.interp(place, self.places, self.values))


@dataclass(frozen=True, eq=False)
class RunRecord:
    """A run."""

    path: Path
    losses: Mapping[str, Curve]  # the training loss by axis, `SAMPLES` and `SECONDS` of training
    evaluations: Mapping[str, Mapping[str, Points]]  # by figure and axis; held-out loss and the metrics of the task
    options: Mapping[str, Any]  # by dotted name
    started: Mapping[str, Any]  # the event of its newest start
    state: str  # how far it is, in words
    cost: Cost | None  # None if unknown
    kept: Kept | None = None  # how good its promise of its end was

    @property
    def task(self) -> tuple[str, str]:
        """What its losses are of: the name of the task without folders, and the unit of a step's weight."""
        file, colon, function = str(self.options.get("task", "")).rpartition(":")
        return f"{Path(file).name}{colon}{function}", str(self.started.get("unit", ""))


def read_run(path: Path) -> RunRecord:
    """Read a run. Steps and evaluations that were overwritten after a resume or a roll back do not count.

    Errors: TraceError: it is no run, or has no readable step.
    """
    layout = RunLayout(path)
    if not layout.is_run:
        found = "it does not exist" if not path.exists() else "no journal.jsonl there"
        expected = "the folder of a run, such as runs/NAME"
        raise TraceError(f"{path} is not a run", expected=expected, found=found, next_step="ls runs/ shows the runs")
    try:
        past, starts = PastSteps(layout.journal).read(), read_journal_starts(layout.journal)
        evaluations = _evaluations(past)
    except (OSError, KeyError, TypeError, ValueError, IndexError, AttributeError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or f"a line lacks what every such line has ({error})"
        raise TraceError(f"{layout.journal} cannot be read", found=reason) from None
    if len(past.seconds) < 2:
        raise TraceError(f"{path} has no steps yet", expected="a run with at least one step in its journal.jsonl")
    started = next((start.started for start in reversed(starts) if start.started), {})
    config = started.get("config")
    options = flatten(config if isinstance(config, Mapping) else layout.read_config())
    values = np.array(past.losses[1:])
    losses = {
        SAMPLES: Curve(*_segments(np.array(past.positions, float), values), values),
        SECONDS: Curve(*_segments(np.array(past.seconds), values), values),
    }
    ends = [event["event"] for event in starts[-1].events if event["event"] in ENDINGS] if starts else []
    state = f"step {len(past.seconds) - 1:,}, {ends[-1] if ends else 'no end: killed, or still running'}"
    state += f", {len(starts)} starts" if len(starts) > 1 else ""
    return RunRecord(path, losses, evaluations, options, started, state, cost_of(starts), kept(starts))


def _segments(ends: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Return where each step begins and ends on an axis.

    A run that began from the state of another run has no record of earlier samples: its first step has the usual
    number of them.
    """
    begins, ends = ends[:-1].copy(), ends[1:]
    first = int(np.argmax(ends > 0))
    if first and len(ends) > first + 1:
        begins[first] = max(0.0, ends[first] - float(np.median(np.diff(ends[first:]))))
    return begins, ends


def _evaluations(past: PastSteps) -> dict[str, dict[str, Points]]:
    """Return the evaluated figures, by name and axis."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for step, event in sorted(past.evaluations.items()):
        if step not in past:
            continue
        figures = {HELD_OUT: event["loss"]}
        for name, value in (event.get("metrics") or {}).items():  # one with the name of a figure of ours gets another
            figures[f"metric_{name}" if name in (LOSS, HELD_OUT) else name] = value
        for name, value in figures.items():
            place = (float(past.positions[step]), past.seconds[step])
            found.setdefault(name, []).append((*place, float("nan") if value is None else float(value)))
    columns = {name: np.array(rows).T for name, rows in found.items()}
    return {name: {SAMPLES: Points(x, y), SECONDS: Points(s, y)} for name, (x, s, y) in columns.items()}
