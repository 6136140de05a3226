"""The TensorBoard sink: one folder per run, read by ``tensorboard --logdir RUN/tensorboard``."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hvdtrain.observe import tensorboard_page as page
from hvdtrain.observe.past_journal import PastSteps
from hvdtrain.observe.scalars import BANDS, OF_EVENTS, Interval, machine_scalars, numbers, rank_scalars, stacked
from hvdtrain.observe.tensorboard_page import EventFile
from hvdtrain.runtime.clock import steady_s

EVERY_S = 0.25
"""Seconds between points. TensorBoard computes checksums in Python: 0.1 ms a point, under the interpreter lock."""

_OF_RUN = 3e-4
"""Of the time of training so far: points become this rare, so that three days take about 25 MB."""

_REPLAYED_S = 30.0
"""Seconds before a checkpoint in which a killed process may have lost points."""

_SHOWN_AS_TEXT = (
    *("warning", "verdict", "checkpoint_failed", "copy_failed", "loss_spike", "wrong_rank"),
    *("grad_norm_spike", "skipped_step", "not_finite", "failed", "stopped", "config_changed"),
)
"""Events on the text page."""


def is_installed() -> bool:
    """Return whether TensorBoard is installed."""
    return find_spec("tensorboard") is not None


class TensorBoard:
    """Writes the files of TensorBoard, in `RUN/tensorboard`. Called from one thread, on rank 0.

    The loss is in three of TensorBoard's runs, because a run has one axis: steps, samples consumed, and whole seconds
    of training without pauses. The held-out loss is in three more, because a run has one colour. Several fast steps
    share a point. The first step and the last step of a start and each saved step have a point of their own. Points of
    repeated steps are replaced; `journal` has the steps of earlier starts, if there are any.
    """

    def __init__(self, directory: Path, journal: Path, *, gpu: bool = False) -> None:
        self._directory = directory
        self._journal = journal
        self._gpu = gpu
        self._started: Mapping[str, Any] = {}
        self._flops: Mapping[str, Any] = {}
        self._machine: dict[str, float] = {}
        self._resumed: Mapping[str, Any] | None = None
        self._early: list[Mapping[str, Any]] = []
        self._files: dict[str, EventFile] = {}
        self._interval = Interval()
        self._step = 0
        self._written_s = -float("inf")
        self._seconds = 0.0
        self._last_x: dict[str, int] = {}
        self._has_page = False

    def write(self, record: Mapping[str, Any]) -> None:
        """Write a record of the run. Errors: OSError: the disk is full or lost."""
        event = record.get("event")
        if event is None:
            self._take_step(record)
        elif event == "started":
            self._started = record
        elif event == "resumed":
            self._resumed = record
        elif event == "flops":
            self._flops = record
        elif event == "machine":
            self._machine = machine_scalars(record)
        elif event == "evaluation":
            values = numbers(OF_EVENTS[event](record))
            self._add(page.scalars(values), record)
            self._add_loss("heldout", values.get("loss/heldout"), record.get("at_step", self._step), _time(record))
        elif event == "ranks":
            self._add(page.scalars(rank_scalars(record)), record)
        elif event == "explained":  # the report of the run's end: figures as points of the last step
            self._point()
            self._add(page.scalars(numbers(OF_EVENTS[event](record))), record)
            self._add(page.text("report/findings", page.findings(record)), record)
        elif event in OF_EVENTS:
            self._add(page.scalars(numbers(OF_EVENTS[event](record))), record)
        elif event == "rolled_back":  # continue after the step that it went back to; later points are replaced
            self.close()
            self._resumed = {"step": record["to_step"]}
            self._add_text(record)
        elif event == "checkpoint":
            self._point()  # so that a resumed run finds the points up to here
        elif event in _SHOWN_AS_TEXT:
            self._add_text(record)

    def close(self) -> None:
        """Write the last point, and close the files."""
        try:
            self._point()
        finally:
            for file in self._files.values():
                file.close()
            self._files = {}

    def _opened(self) -> dict[str, EventFile]:
        """Return the open files. They are created once it is known whether the run is resumed."""
        if not self._files:
            if self._resumed is None:
                self._open(0, 0, 0.0)
            else:
                self._resume(self._resumed)
        return self._files

    def _resume(self, record: Mapping[str, Any]) -> None:
        """Continue after the step of `record`. Points of the seconds before it are written again from the journal.

        The journal of a killed process has more steps than its TensorBoard files.
        """
        step = record["step"]
        past = PastSteps(self._journal).read()
        if step not in past:  # the checkpoint is from another run
            self._open(step, record.get("position", 0), 0.0)
            return
        first = past.step_before(step, _REPLAYED_S)
        self._open(first, past.positions[first], past.seconds[first])
        for earlier in past.records_after(first, step):
            self.write(earlier)
        self._point()

    def _open(self, step: int, position: int, seconds: float) -> None:
        """Begin files after `step`. They make readers drop later points of earlier files: at step 0 all points."""
        self._step, self._seconds = step, seconds
        self._interval = Interval(self._started.get("unit", "tokens"), position)
        again = step > 0
        self._last_x = dict.fromkeys((".", "heldout"), int(seconds)) if again else {}
        starts = {f"step/{band}": step for band in BANDS}
        for run in (".", "heldout"):
            starts |= {run: step, f"{run}/by_samples": position, f"{run}/by_seconds": int(seconds)}
        files = {}
        with ExitStack() as on_error:
            for run, start in starts.items():
                files[run] = on_error.enter_context(closing(EventFile(self._directory / run, start + again)))
            on_error.pop_all()
        self._files = files
        self._files["."].add(page.text("config", page.config_table(self._started)), step + again, _time(self._started))
        early, self._early = self._early, []
        for record in early:
            self._add_text(record)

    def _take_step(self, record: Mapping[str, Any]) -> None:
        self._opened()
        self._interval.add(record)
        self._step = record["step"]
        self._seconds += record["step_s"]
        every_s = max(EVERY_S, _OF_RUN * self._seconds)
        if not 0 <= record["time"] - self._written_s < every_s:  # negative: the clock was changed between two starts
            self._point()

    def _point(self) -> None:
        """Write a point for the steps since the last one, with the newest sample of the machine."""
        last = self._interval.last
        if last is None:
            return
        files, time_s = self._opened(), last["time"]
        self._written_s = time_s
        per_sample, peak = self._flops.get("per_sample"), self._flops.get("peak_per_s")
        values = {**self._interval.scalars(per_sample, peak), **self._machine}
        self._machine = {}
        files["."].add(page.scalars(values), last["step"], time_s)
        self._add_loss(".", values.get("loss/train"), last["step"], time_s)
        for band, (low, high) in stacked(values).items():
            edges = {page.STACK_FROM: low, page.STACK_TO: high}
            files[f"step/{band}"].add(page.scalars(edges), last["step"], time_s)
        if not self._has_page:
            self._has_page = True
            known = {"flops": bool(per_sample), "peak": bool(per_sample and peak)}
            several = self._started.get("size", 1) > 1
            shown = page.layout(self._started.get("unit", "tokens"), gpu=self._gpu, several=several, **known)
            files["."].add(shown, last["step"], time_s)

    def _add_loss(self, run: str, loss: float | None, step: int, time_s: float) -> None:
        """Write a loss by steps, by samples, and by seconds (at most one point a second)."""
        if loss is None:
            return
        points = [("", page.LOSS_BY_STEP, step), ("/by_samples", page.LOSS_BY_SAMPLES, self._interval.position)]
        if (x := int(self._seconds)) > self._last_x.get(run, -1):
            self._last_x[run] = x
            points.append(("/by_seconds", page.LOSS_BY_SECONDS, x))
        for suffix, tag, place in points:
            self._files[run + suffix].add(page.scalars({tag: loss}), place, time_s)

    def _add(self, summary: Any, record: Mapping[str, Any]) -> None:
        self._opened()["."].add(summary, record.get("at_step", self._step), _time(record))

    def _add_text(self, record: Mapping[str, Any]) -> None:
        if not self._files:  # later records say whether the run is resumed
            self._early.append(record)
            return
        facts = {name: value for name, value in record.items() if name not in ("event", "time", "at_step")}
        summary = page.text(f"events/{record['event']}", "; ".join(f"{name}: {value}" for name, value in facts.items()))
        self._files["."].add(summary, record.get("at_step", self._step), _time(record))


def _time(record: Mapping[str, Any]) -> float:
    return float(record.get("time") or steady_s())
