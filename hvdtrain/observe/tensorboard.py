"""The sink for TensorBoard: one folder a run, read by ``tensorboard --logdir RUN/tensorboard``."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.observe import tensorboard_page as page
from hvdtrain.observe.event_file import EventFile
from hvdtrain.observe.past_journal import Past
from hvdtrain.observe.scalars import BANDS, Interval, machine_scalars, numbers, rank_scalars, stacked
from hvdtrain.runtime.clock import steady_s

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary

_HISTOGRAMS = "histograms"

EVERY_S = 0.25
"""Seconds between points: TensorBoard's checksums are computed in Python, some 0.1 ms a point under the lock that the
training thread needs too."""

_REPLAYED_S = 30.0
"""Seconds before a checkpoint of which a killed process may not have written all."""

_TOLD = (
    "warning",
    "checkpoint_failed",
    "loss_spike",
    "skipped_step",
    "not_finite",
    "failed",
    "stopped",
    "config_changed",
)
"""Events that stand on the text page."""


def is_installed() -> bool:
    """Whether what the sink needs beside torch is there."""
    return find_spec("tensorboard") is not None


class TensorBoard:
    """Writes what TensorBoard shows of a run. Called from one thread, on rank 0.

    Loss stands in three runs, since TensorBoard has one axis a run: by step, by samples consumed, and by seconds of
    training (whole ones; pauses between stretches left out). Where steps come fast, a point stands for several
    of them; the first and the last of a stretch, and each that was saved, have one of their own.

    Args:
        directory: `RUN/tensorboard`. What it holds of steps that are done again is replaced.
        journal: tells of earlier stretches; it may be missing.
        gpu: show charts of a GPU.
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
        """Take a record of the run.

        Errors:
            OSError: the disk is full or went away.
        """
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
            self._evaluation(record)
        elif event == "histograms":
            self._histograms(record)
        elif event == "ranks":
            self._add(page.scalars(rank_scalars(record)), record)
        elif event == "explained":
            self._explained(record)
        elif event == "rolled_back":
            self._go_back(record)
        elif event == "checkpoint":
            self._point()  # what a resumed run follows on is there
        elif event == "finished":
            self._opened()["."].add([page.hyperparameters_end()], self._step, _time(record))
        elif event in _TOLD:
            self._tell(record)

    def close(self) -> None:
        """Write what is left, and close the files."""
        try:
            self._point()
        finally:
            for file in self._files.values():
                file.close()
            self._files = {}

    def _go_back(self, record: Mapping[str, Any]) -> None:
        """Follow on from the step that training was taken back to: what comes after it there is replaced."""
        self.close()
        self._resumed = {"step": record["to_step"]}
        self._tell(record)

    def _opened(self) -> dict[str, EventFile]:
        """The files, made once it is known whether the run is resumed and what a sample takes."""
        if not self._files:
            if self._resumed is None:
                self._open(0, 0, 0.0)
            else:
                self._resume(self._resumed)
        return self._files

    def _resume(self, record: Mapping[str, Any]) -> None:
        """Go on after the step of `record`. What the journal has of the seconds before it is written again.

        A process that was killed has told its journal of more than it has written here.
        """
        step = record["step"]
        past = Past(self._journal).read()
        if step not in past:  # the checkpoint is another run's
            self._open(step, record.get("position", 0), 0.0)
            return
        first = past.before(step, _REPLAYED_S)
        self._open(first, past.positions[first], past.seconds[first])
        for earlier in past.after(first, step):
            self.write(earlier)
        self._point()

    def _open(self, step: int, position: int, seconds: float) -> None:
        """Begin files that follow on from `step`; what others hold of later ones is dropped, at step 0 everything."""
        config = self._started.get("config") or {}
        self._step, self._seconds = step, seconds
        self._interval = Interval(self._started.get("unit", "tokens"), position)
        again = step > 0
        self._last_x = dict.fromkeys(("train", "heldout"), int(seconds)) if again else {}
        self._files = {
            ".": EventFile(self._directory, step + again),
            "by_samples": EventFile(self._directory / "by_samples", position + again),
            "by_seconds": EventFile(self._directory / "by_seconds", int(seconds) + again),
            **{band: EventFile(self._directory / "step" / band, step + again) for band in BANDS},
        }
        if (self._directory / _HISTOGRAMS).exists():
            self._own_file()
        first = [page.text("config", page.config_table(self._started)), *page.hyperparameters(config)]
        self._files["."].add(first, step + again, _time(self._started))
        early, self._early = self._early, []
        for record in early:
            self._tell(record)

    def _take_step(self, record: Mapping[str, Any]) -> None:
        self._opened()
        self._interval.add(record)
        self._step = record["step"]
        self._seconds += record["step_s"]
        if not 0 <= record["time"] - self._written_s < EVERY_S:  # negative: the clock was set between two starts
            self._point()

    def _point(self) -> None:
        """Write the steps since the last point, with the newest sample of the machine."""
        last = self._interval.last
        if last is None:
            return
        files, time_s = self._opened(), last["time"]
        self._written_s = time_s
        per_sample, peak = self._flops.get("per_sample"), self._flops.get("peak_per_s")
        values = {**self._interval.take(per_sample, peak), **self._machine}
        self._machine = {}
        files["."].add([page.scalars(values)], last["step"], time_s)
        self._elsewhere("train", values.get("loss/train"), time_s)
        for band, (low, high) in stacked(values).items():
            edges = {page.STACK_FROM: low, page.STACK_TO: high}
            files[band].add([page.scalars(edges)], last["step"], time_s)
        if not self._has_page:
            self._has_page = True
            unit = self._started.get("unit", "tokens")
            several = self._started.get("size", 1) > 1
            flops = bool(per_sample)
            shown = page.layout(unit, gpu=self._gpu, several=several, flops=flops, peak=bool(flops and peak))
            files["."].add([shown], last["step"], time_s)

    def _evaluation(self, record: Mapping[str, Any]) -> None:
        step, time_s = record.get("at_step", self._step), _time(record)
        values = {f"heldout/{name}": value for name, value in (record.get("metrics") or {}).items()}
        values["loss/heldout"] = record["loss"]
        self._opened()["."].add([page.scalars(numbers(values))], step, time_s)
        self._elsewhere("heldout", numbers(values).get("loss/heldout"), time_s)

    def _elsewhere(self, kind: str, loss: float | None, time_s: float) -> None:
        """The loss by samples, and by seconds: at most one point a second there."""
        if loss is None:
            return
        summary = page.scalars({f"loss_by_samples/{kind}": loss})
        self._files["by_samples"].add([summary], self._interval.position, time_s)
        x = int(self._seconds)
        if x > self._last_x.get(kind, -1):
            self._last_x[kind] = x
            self._files["by_seconds"].add([page.scalars({f"loss_by_seconds/{kind}": loss})], x, time_s)

    def _histograms(self, record: Mapping[str, Any]) -> None:
        found = [page.histogram_values(kind, record[kind]) for kind in ("parameters", "gradients")]
        self._opened()
        self._own_file().add(found, record.get("at_step", self._step), _time(record))

    def _explained(self, record: Mapping[str, Any]) -> None:
        """What the end of the run says of it: figures as points of its last step, findings as text."""
        self._point()
        figures = {f"report/{name}": value for name, value in record["figures"].items()}
        self._add(page.scalars(numbers(figures)), record)
        self._add(page.text("report/findings", page.findings(record)), record)

    def _add(self, summary: Summary, record: Mapping[str, Any]) -> None:
        self._opened()["."].add([summary], record.get("at_step", self._step), _time(record))

    def _own_file(self) -> EventFile:
        """That of histograms, which no journal can tell again: those up to the checkpoint stay."""
        if _HISTOGRAMS not in self._files:
            first = 0 if self._resumed is None else self._resumed["step"] + 1
            self._files[_HISTOGRAMS] = EventFile(self._directory / _HISTOGRAMS, first)
        return self._files[_HISTOGRAMS]

    def _tell(self, record: Mapping[str, Any]) -> None:
        if not self._files:  # only the next records tell whether the run is resumed
            self._early.append(record)
            return
        facts = {name: value for name, value in record.items() if name not in ("event", "time", "at_step")}
        told = page.text(f"events/{record['event']}", "; ".join(f"{name}: {value}" for name, value in facts.items()))
        self._files["."].add([told], record.get("at_step", self._step), _time(record))


def _time(record: Mapping[str, Any]) -> float:
    return float(record.get("time") or steady_s())
