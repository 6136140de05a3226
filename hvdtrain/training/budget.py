"""Where the time of a run went, in five parts that add up to its wall time. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_STEP_PARTS = {
    "data": ("data_s", "copy_s"),
    "forward and backward": ("forward_s", "backward_s"),
    "exposed communication": ("exposed_comm_s",),
    "clipping and optimizer": ("clip_s", "optimizer_s"),
}
REST = "evaluation, checkpoints, rest"


def budget(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of rank 0 by part, over the steps of a run's last start; empty where there are none.

    The wall time is that from the first step's begin to the last line that says a time: an evaluation before the
    first step is not in it, the checkpoint after the last one is.

    Args:
        lines: a journal's lines.
    """
    begin = max((i for i, line in enumerate(lines) if line.get("event") == "started"), default=0)
    steps = [line for line in lines[begin:] if "event" not in line]
    if not steps:
        return {}
    parts = {name: sum(line[field] for line in steps for field in fields) for name, fields in _STEP_PARTS.items()}
    wall = max(line["time"] for line in lines[begin:]) - (steps[0]["time"] - steps[0]["step_s"])
    parts[REST] = max(0.0, wall - sum(parts.values()))
    return parts
