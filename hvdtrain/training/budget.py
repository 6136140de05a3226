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


def budget(lines: Sequence[Mapping[str, Any]], resumed_at: int) -> dict[str, float]:
    """Seconds of rank 0 by part, over the steps after `resumed_at`; empty where there are none.

    The wall time is that from the first step's begin to the last line that says a time: an evaluation before the
    first step is not in it, the checkpoint after the last one is.

    Args:
        lines: a journal's lines; of a step that was done again, the last counts.
        resumed_at: the step that this stretch of the run started from.
    """
    begin = max((i for i, line in enumerate(lines) if line.get("event") == "started"), default=0)
    steps = {line["step"]: line for line in lines[begin:] if "event" not in line and line["step"] > resumed_at}
    if not steps:
        return {}
    first = steps[min(steps)]
    end = max(line["time"] for line in lines[begin:] if "time" in line)
    parts = {
        name: sum(line.get(field) or 0.0 for line in steps.values() for field in fields)
        for name, fields in _STEP_PARTS.items()
    }
    wall = end - (first["time"] - first["step_s"])
    parts[REST] = max(0.0, wall - sum(parts.values()))
    return parts
