"""The present figures of a run, under names for Prometheus and OpenTelemetry. Pure.

A rank has six numbers at most, so a job of 1,024 ranks has 6,144 of them.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from hvdtrain.observe.scalars import PARTS, numbers

PREFIX = "hvdtrain"
_RANK = ("rank", "host")
_ALARMS = ("warning", "loss_spike", "grad_norm_spike", "not_finite", "skipped_step", "rolled_back", "wrong_rank",
           "checkpoint_failed", "failed")  # fmt: skip


class Metric(NamedTuple):
    """A number of a run, or one for each value of `labels`; with `counts` a counter since the process started."""

    name: str  # without `PREFIX`, unit and suffix
    help: str
    unit: str = ""  # a base unit as Prometheus spells it; empty for counts
    event: str = "step"  # the record that has it, and its key there, and the factor to the unit
    field: str = ""
    factor: float = 1.0
    labels: tuple[str, ...] = ()
    counts: bool = False


_of_rank = partial(Metric, event="ranks", labels=_RANK)
_ms_of_rank = partial(_of_rank, unit="seconds", factor=1e-3)

METRICS = (
    Metric("step", "Step of the run.", field="step"),
    Metric("ranks", "Number of ranks.", event="started", field="size"),
    Metric("last_step_timestamp", "Time at the end of the newest step, since 1970.", "seconds", field="time"),
    Metric("loss", "Training loss of the newest step.", field="loss"),
    Metric("heldout_loss", "Held-out loss of the newest evaluation.", event="evaluation", field="loss"),
    Metric("learning_rate", "Learning rate of the optimizer's first group.", field="lr"),
    Metric("gradient_norm", "L2 norm of the gradient before clipping.", field="grad_norm"),
    Metric("steps", "Steps done, repeated ones included.", counts=True),
    Metric("skipped_steps", "Steps that changed nothing: not finite.", field="skipped", counts=True),
    Metric("tokens", "Weight of the batches used: tokens, or what the task counts.", field="tokens", counts=True),
    Metric("step_time", "Time of steps on rank 0.", "seconds", field="step_s", counts=True),
    Metric("part_time", "Time of a part of steps on rank 0.", "seconds", labels=("part",), counts=True),
    _ms_of_rank("exposed", "Wait for the exchange after the last rank was ready.", field="exposed_ms", counts=True),
    _ms_of_rank("wait", "Wait for ranks that were ready later.", field="wait_ms", counts=True),
    _ms_of_rank("late", "How much later than the first rank it was ready: a mean.", field="late_ms"),
    Metric("goodput", "Share of the device-hours so far that useful steps took.", "ratio", "look", "goodput"),
    Metric("slow", "1 for what slows the run at the newest look.", event="look", labels=("about",)),
    Metric("alarms", "Events that ask for attention.", event="", labels=("event",), counts=True),
    Metric("energy", "Energy of all devices.", "joules", "energy", "joules", labels=("kind",), counts=True),
    _of_rank("gpu_clock", "Clock of the GPU.", "hertz", field="gpu_clock_mhz", factor=1e6),
    _of_rank("gpu_temperature", "Temperature of the GPU.", "celsius", field="gpu_temperature_c"),
    _of_rank("gpu_throttled", "Why the clock of the GPU is lowered: NVML's bits.", field="gpu_throttle"),
    Metric("gpu_usage", "Use of rank 0's GPU.", "ratio", "machine", "gpu_percent", 0.01),
    Metric("gpu_power", "Power of rank 0's GPU.", "watts", "machine", "gpu_power_w"),
    Metric("gpu_memory_used", "Memory in use of rank 0's GPU.", "bytes", "machine", "gpu_memory_used_bytes"),
)

_Labels = tuple[str, ...]


class RunMetrics:
    """The newest values of `METRICS`. One thread writes records, others read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, dict[_Labels, float]] = {metric.name: {} for metric in METRICS}
        self._values["alarms"] = {(event,): 0.0 for event in _ALARMS}
        self._hosts: Sequence[str] = ()
        self._means: dict[str, dict[_Labels, float]] = {}  # of the newest block of steps, for counters
        self._since = 0  # steps since that block

    def values(self, metric: Metric) -> dict[_Labels, float]:
        """Return the values of a metric by its labels."""
        with self._lock:
            means = self._means.get(metric.name, {})
            return {key: n + self._since * means.get(key, 0.0) for key, n in self._values[metric.name].items()}

    def write(self, record: Mapping[str, Any]) -> None:
        """Take the values of a record of the run."""
        event = record.get("event", "step")
        with self._lock:
            for metric in METRICS:
                if metric.event == event and metric.labels != _RANK:
                    self._take(metric, record.get(metric.field), record)
            self._since += event == "step"
            if event == "ranks":
                self._take_ranks(record)
            if event == "explained" and (goodput := record["figures"].get("goodput")) is not None:
                self._values["goodput"] = {(): goodput}
            if event in _ALARMS:
                self._values["alarms"][event,] += 1.0

    def _take(self, metric: Metric, value: Any, record: Mapping[str, Any]) -> None:
        values = self._values[metric.name]
        if metric.name == "slow":
            self._values["slow"] = {(about,): 1.0 for about in record["verdicts"]}
        elif metric.name == "part_time":
            for field, part in PARTS.items():
                values[part,] = values.get((part,), 0.0) + (record.get(field) or 0.0)
        elif metric.name == "energy":
            values |= {(kind,): joules for kind, joules in value.items()}
        elif metric.counts:
            values[()] = values.get((), 0.0) + float(1.0 if metric.name == "steps" else value or 0.0)
        elif numbers({"": value}):
            values[()] = metric.factor * value

    def _take_ranks(self, record: Mapping[str, Any]) -> None:
        """Take the means over a block: counters grow by them in each later step, and at once of a first one."""
        ranks: list[_Labels] = [(str(rank), host) for rank, host in enumerate(record["hosts"])]
        is_first = record["hosts"] != self._hosts  # of a round
        self._hosts = record["hosts"]
        steps = max(0, record["at_step"] - record["first_step"] + 1) if is_first else self._since
        for metric in METRICS:
            if metric.labels == _RANK:
                before = self._values[metric.name]
                found = {**record, **record["facts"]}.get(metric.field) or [None] * len(ranks)
                new = {rank: metric.factor * each for rank, each in zip(ranks, found, strict=True) if each is not None}
                if metric.counts:
                    means, self._means[metric.name] = self._means.get(metric.name, {}), new
                    means = new if is_first else means
                    new = {rank: before.get(rank, 0.0) + steps * means.get(rank, 0.0) for rank in ranks}
                self._values[metric.name] = new
        self._since = 0
