"""Named numbers for charts: means over the steps between two points."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from hvdtrain.spans import JOURNAL_KEYS

PARTS = {key: key.removesuffix("_s") for key in JOURNAL_KEYS.values()}
"""Fields of a step's record that are parts of its `step_s`, in the order in which they are stacked."""

BANDS = {
    "1_data": ("data", "copy"),
    "2_forward": ("forward",),
    "3_backward": ("backward",),
    "4_exposed_comm": ("exposed_comm", "gather", "activations"),
    "5_optimizer": ("clip", "optimizer"),
    "6_other": (),
}
"""Bands of the stacked chart from the bottom up, and their parts. The last band is the rest of the step."""

_GIB = 2.0**-30
MACHINE = {
    "gpu_percent": ("machine/gpu_percent", 1.0, "GPU (%)"),
    "gpu_clock_mhz": ("machine/gpu_clock_mhz", 1.0, "GPU clock (MHz)"),
    "gpu_temperature_c": ("machine/gpu_temperature_c", 1.0, "GPU temperature (°C)"),
    "gpu_power_w": ("machine/gpu_power_w", 1.0, "GPU power (W)"),
    "gpu_memory_used_bytes": ("memory/gpu_used_gib", _GIB, "GPU memory in use (GiB)"),
    "gpu_memory_total_bytes": ("memory/gpu_total_gib", _GIB, ""),
    "cuda_allocated_peak_bytes": ("memory/cuda_allocated_peak_gib", _GIB, "GPU memory, peak allocated by torch (GiB)"),
    "cuda_reserved_peak_bytes": ("memory/cuda_reserved_peak_gib", _GIB, "GPU memory, peak reserved by torch (GiB)"),
    "host_cpu_percent": ("machine/host_cpu_percent", 1.0, "host CPU (%)"),
    "process_rss_bytes": ("memory/process_gib", _GIB, "host memory, process of rank 0 (GiB)"),
    "host_memory_used_bytes": ("memory/host_used_gib", _GIB, "host memory in use, all processes (GiB)"),
    "host_memory_total_bytes": ("memory/host_total_gib", _GIB, ""),
}
"""Fields of a machine sample: tag, the factor to the unit of the tag, and the title of its chart if it has one."""


class Interval:
    """The steps since the last point, at `position` (samples consumed). `unit` is what a step's `tokens` counts."""

    def __init__(self, unit: str = "tokens", position: int = 0) -> None:
        self.position = position
        self._unit = unit
        self._clear()

    def _clear(self) -> None:
        self.last: Mapping[str, Any] | None = None
        self._steps = self._samples = self._skipped = 0
        self._seconds = self._weight = 0.0
        self._parts = dict.fromkeys(PARTS, 0.0)

    def add(self, record: Mapping[str, Any]) -> None:
        """Add the record of a step."""
        self.last = record
        self._steps += 1
        self._samples += record["position"] - self.position
        self.position = record["position"]
        self._seconds += record["step_s"]
        self._weight += record["tokens"]
        self._skipped += bool(record.get("skipped"))
        for field in PARTS:
            self._parts[field] += record.get(field) or 0.0

    def scalars(self, flops_per_sample: float | None = None, peak_flops_per_s: float | None = None) -> dict[str, float]:
        """Return the numbers by tag, and begin a new interval.

        Loss, learning rate and gradient norm are of the newest step. Times are means per step. `flops_per_sample` are
        those of forward and backward, `peak_flops_per_s` those of all devices together.
        """
        assert self.last is not None
        last, seconds = self.last, max(self._seconds, 1e-9)
        per_step_ms = 1e3 / self._steps
        found = {
            "loss/train": last["loss"],
            "optimizer/learning_rate": last["lr"],
            "optimizer/gradient_norm": last["grad_norm"],
            "optimizer/skipped_steps": self._skipped,
            f"speed/{self._unit}_per_s": self._weight / seconds,
            "step_ms/step": self._seconds * per_step_ms,
            "communication/exposed_ms": self._parts["exposed_comm_s"] * per_step_ms,
            "communication/exposed_percent": 100 * self._parts["exposed_comm_s"] / seconds,
            **{f"step_ms/{part}": self._parts[field] * per_step_ms for field, part in PARTS.items()},
        }
        if flops_per_sample:
            flops_per_s = flops_per_sample * self._samples / seconds
            found["speed/tflops_per_s"] = flops_per_s / 1e12
            if peak_flops_per_s:
                found["speed/flops_utilisation_percent"] = 100 * flops_per_s / peak_flops_per_s
        self._clear()
        return numbers(found)


def stacked(values: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Return the lower and upper edge of each band in ms: the sum of the parts below it, and that with the band."""
    edges, low = {}, 0.0
    for band, parts in BANDS.items():
        high = low + sum(values[f"step_ms/{part}"] for part in parts) if parts else max(low, values["step_ms/step"])
        edges[band] = (low, high)
        low = high
    return edges


def rank_scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the delay of the slowest rank after the median of the others, its number, and exposed communication (ms).

    `record` is an event ``ranks``: means over some steps, one number per rank.
    """
    late = {rank: ms for rank, ms in enumerate(record["late_ms"]) if isinstance(ms, (int, float))}
    exposed = [ms for ms in record["exposed_ms"] if isinstance(ms, (int, float))]
    found = {}
    if len(late) > 1:
        last = max(late, key=lambda rank: late[rank])
        others = median(ms for rank, ms in late.items() if rank != last)
        found = {"straggler/cost_ms": late[last] - others, "straggler/rank": float(last)}
    if exposed:
        found["straggler/exposed_ms"] = sum(exposed) / len(exposed)
    return numbers(found)


OF_EVENTS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "memory": lambda event: {f"memory_mib/{kind.replace(' ', '_')}": mib for kind, mib in event["mib"].items()},
    "experts": lambda event: {
        f"experts/{value}/{name}": layer[value]
        for value in ("busiest", "entropy")  # load of the busiest expert over the mean
        for name, layer in event["layers"].items()
    },
    "outer_step": lambda event: {
        "outer/drift": event["drift"],
        "outer/cosine": min(event["cosines"]),  # of all workers
        "outer/wait_ms": 1e3 * event["wait_s"],  # of rank 0
    },
    "evaluation": lambda event: {
        **{f"heldout/{name}": value for name, value in (event.get("metrics") or {}).items()},
        "loss/heldout": event["loss"],
    },
    "explained": lambda event: {f"report/{name}": value for name, value in event["figures"].items()},
}
"""Numbers of an event for charts, by its name."""


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that are numbers, inf and nan included."""
    return {tag: float(v) for tag, v in values.items() if isinstance(v, (int, float))}


def machine_scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a machine sample by tag. Numbers that the machine does not have are absent."""
    found = numbers({field: record.get(field) for field in MACHINE})
    scaled = {MACHINE[field][0]: value * MACHINE[field][1] for field, value in found.items()}
    if "gpu_throttle" in record:
        scaled["machine/gpu_throttled"] = float(bool(record["gpu_throttle"]))
    return scaled
