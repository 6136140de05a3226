"""The present figures of a run, under names for Prometheus and OpenTelemetry. Pure.

A rank has six numbers at most, so a job of 1,024 ranks has 6,144 of them.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.observe.scalars import PARTS, numbers

PREFIX = "hvdtrain"
_RANK = ("rank", "host")

_ALARMS = ("warning", "loss_spike", "loss_rises", "grad_norm_spike", "not_finite", "skipped_step", "rolled_back",
           "checkpoint_failed", "failed")  # fmt: skip


@dataclass(frozen=True)
class Metric:
    """A number of a run, or one for each value of `labels`."""

    name: str  # without `PREFIX`, unit and suffix
    help: str
    unit: str = ""  # a base unit as Prometheus spells it; empty for counts
    labels: tuple[str, ...] = ()
    counts: bool = False  # a counter, since the process started; otherwise the present value


def _counter(name: str, text: str, unit: str = "", labels: tuple[str, ...] = ()) -> Metric:
    return Metric(name, text, unit, labels, counts=True)


METRICS = (
    Metric("step", "Step of the run."),
    Metric("ranks", "Number of ranks."),
    Metric("last_step_timestamp", "Time at the end of the newest step, since 1970.", "seconds"),
    Metric("loss", "Training loss of the newest step."),
    Metric("heldout_loss", "Held-out loss of the newest evaluation."),
    Metric("learning_rate", "Learning rate of the optimizer's first group."),
    Metric("gradient_norm", "L2 norm of the gradient before clipping."),
    _counter("steps", "Steps done, repeated ones included."),
    _counter("skipped_steps", "Steps that changed nothing: loss or gradient was not finite."),
    _counter("tokens", "Weight of the batches used: tokens, or what the task counts."),
    _counter("step_time", "Time of steps on rank 0.", "seconds"),
    _counter("part_time", "Time of a part of steps on rank 0.", "seconds", ("part",)),
    _counter("exposed", "Wait for the exchange after the last rank was ready; from recorded steps.", "seconds", _RANK),
    _counter("wait", "Wait for ranks that were ready later; from recorded steps.", "seconds", _RANK),
    Metric("late", "How much later than the first rank it was ready, a mean over some steps.", "seconds", _RANK),
    Metric("goodput", "Share of the device-hours so far that useful steps took, at the newest look.", "ratio"),
    Metric("slow", "1 for what slows the run at the newest look.", labels=("about",)),
    _counter("alarms", "Events that ask for attention.", labels=("event",)),
    _counter("energy", "Energy of the devices of all ranks.", "joules", ("kind",)),
    Metric("gpu_clock", "Clock of the GPU.", "hertz", _RANK),
    Metric("gpu_temperature", "Temperature of the GPU.", "celsius", _RANK),
    Metric("gpu_throttled", "1 if the clock of the GPU is lowered.", labels=_RANK),
    Metric("gpu_usage", "Use of rank 0's GPU.", "ratio"),
    Metric("gpu_power", "Power of rank 0's GPU.", "watts"),
    Metric("gpu_memory_used", "Memory in use of rank 0's GPU.", "bytes"),
)

_GPUS = (("gpu_clock_mhz", "gpu_clock", 1e6), ("gpu_temperature_c", "gpu_temperature", 1.0))
_GPU_OF_RANK_0 = (
    ("gpu_percent", "gpu_usage", 0.01),
    ("gpu_power_w", "gpu_power", 1.0),
    ("gpu_memory_used_bytes", "gpu_memory_used", 1.0),
)
_OF_STEP = (("step", "step"), ("time", "last_step_timestamp"), ("loss", "loss"), ("lr", "learning_rate"),
            ("grad_norm", "gradient_norm"))  # fmt: skip

_Labels = tuple[str, ...]


class RunMetrics:
    """The newest values of `METRICS`. One thread writes records, others read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[Metric, dict[_Labels, float]] = {metric: {} for metric in METRICS}
        self._named = {metric.name: metric for metric in METRICS}
        self._ranks_at: int | None = None
        self._hosts: Sequence[str] = ()
        for event in _ALARMS:
            self._add("alarms", 0.0, event)

    def write(self, record: Mapping[str, Any]) -> None:
        """Take the values of a record of the run."""
        event = record.get("event")
        with self._lock:
            if event is None:
                self._step(record)
            elif event == "started":
                self._set("ranks", record["size"])
            elif event == "evaluation":
                self._set("heldout_loss", record["loss"])
            elif event == "ranks":
                self._of_ranks(record)
            elif event == "machine":
                for field, name, factor in _GPU_OF_RANK_0:
                    self._set(name, record.get(field), factor=factor)
            elif event == "energy":
                for kind, joules in record["joules"].items():
                    self._values[self._named["energy"]][kind,] = joules
            elif event == "look":
                self._values[self._named["slow"]] = {(about,): 1.0 for about in record["verdicts"]}
                self._set("goodput", record["goodput"])
            elif event == "explained":
                self._set("goodput", record["figures"].get("goodput"))
            if event in _ALARMS:
                self._add("alarms", 1.0, event)

    def values(self, metric: Metric) -> dict[_Labels, float]:
        """Return the values of a metric by its labels."""
        with self._lock:
            return dict(self._values[metric])

    def _step(self, record: Mapping[str, Any]) -> None:
        for field, name in _OF_STEP:
            self._set(name, record.get(field))
        self._add("steps", 1.0)
        self._add("skipped_steps", float(bool(record.get("skipped"))))
        self._add("tokens", record["tokens"])
        self._add("step_time", record["step_s"])
        for field, part in PARTS.items():
            self._add("part_time", record.get(field) or 0.0, part)

    def _of_ranks(self, record: Mapping[str, Any]) -> None:
        """Take the means over a block of steps, which represent the steps since the block before."""
        at, hosts = record["at_step"], record["hosts"]
        if hosts != self._hosts:  # another round
            self._hosts, self._ranks_at = hosts, record["first_step"] - 1
            for metric, values in self._values.items():
                if metric.labels == _RANK:
                    kept = {(str(rank), host) for rank, host in enumerate(hosts)}
                    self._values[metric] = {labels: value for labels, value in values.items() if labels in kept}
        steps = max(0, at - self._ranks_at) if self._ranks_at is not None else 0
        self._ranks_at = at
        for rank, host in enumerate(hosts):
            labels = (str(rank), host)
            for field, name in (("exposed_ms", "exposed"), ("wait_ms", "wait")):
                self._add(name, _at(record, field, rank) / 1e3 * steps, *labels)
            self._set("late", _at(record, "late_ms", rank), *labels, factor=1e-3)
            facts = record["facts"]
            for field, name, factor in _GPUS:
                self._set(name, facts[field][rank] if field in facts else None, *labels, factor=factor)
            if "gpu_throttle" in facts:
                self._set("gpu_throttled", float(facts["gpu_throttle"][rank] > 0), *labels)

    def _set(self, name: str, value: Any, *labels: str, factor: float = 1.0) -> None:
        if numbers({name: value}):
            self._values[self._named[name]][labels] = factor * value

    def _add(self, name: str, value: float, *labels: str) -> None:
        values = self._values[self._named[name]]
        values[labels] = values.get(labels, 0.0) + value


def _at(record: Mapping[str, Any], field: str, rank: int) -> float:
    """Return a rank's mean; 0 if no step of the block was complete."""
    values = record[field]
    return float(values[rank]) if values else 0.0
