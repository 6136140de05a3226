"""Where the time of a run went, in five parts that add up to its wall time. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_STEP_PARTS = {
    "data": ("data_s", "copy_s"),
    "forward and backward": ("forward_s", "backward_s"),
    "exposed communication": ("exposed_comm_s",),
    "clipping and optimizer": ("clip_s", "optimizer_s"),
}
REST = "evaluation, checkpoints, rest"


class Budget:
    """Seconds of rank 0 by part, over the steps of a run's last start, with all rounds of an elastic one; takes a
    journal's lines in order.

    The wall time is that from the first step's begin to the last line: an evaluation before the first step is not in
    it, the checkpoint after the last one is.
    """

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._parts = dict.fromkeys(_STEP_PARTS, 0.0)
        self._begin: float | None = None
        self._end = 0.0

    def add(self, line: Mapping[str, Any]) -> None:
        """Take a line."""
        if line.get("event") == "started" and not line.get("goes_on"):
            self._clear()
        self._end = max(self._end, line["time"])
        if "event" not in line:
            if self._begin is None:
                self._begin = line["time"] - line["step_s"]
            for name, fields in _STEP_PARTS.items():
                self._parts[name] += sum(line[field] for field in fields)

    def parts(self) -> dict[str, float]:
        """Seconds by part; empty where no step was done."""
        if self._begin is None:
            return {}
        wall = self._end - self._begin
        return {**self._parts, REST: max(0.0, wall - sum(self._parts.values()))}
