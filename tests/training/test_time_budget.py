from __future__ import annotations

from typing import Any

import pytest

from hvdtrain.training.result import REST, Tally

PARTS = ("data_s", "copy_s", "forward_s", "backward_s", "exposed_comm_s", "clip_s", "optimizer_s")


def _step(step: int, time: float, step_s: float, **parts: float) -> dict[str, Any]:
    return {
        "step": step,
        "time": time,
        "step_s": step_s,
        "loss": 0.0,
        "tokens": 1.0,
        **dict.fromkeys(PARTS, 0.0),
        **parts,
    }


def budget(lines: list[dict[str, Any]]) -> dict[str, float]:
    found = Tally()
    for line in lines:
        found.add(line)
    parts: dict[str, float] = found.figures()["budget"]
    return parts


def test_the_parts_add_up_to_the_wall_time() -> None:
    lines = [
        {"event": "started", "time": 90.0},
        {"event": "evaluation", "time": 99.0, "loss": 1.0, "metrics": {}},
        _step(1, 102.0, 2.0, data_s=0.25, copy_s=0.25, forward_s=0.5, backward_s=0.5, exposed_comm_s=0.1),
        _step(2, 104.0, 2.0, data_s=0.5, clip_s=0.2, optimizer_s=0.3),
        {"event": "checkpoint", "time": 109.0},
        {"event": "finished", "time": 110.0},
    ]
    parts = budget(lines)
    assert parts == pytest.approx(
        {
            "data": 1.0,
            "forward and backward": 1.0,
            "exposed communication": 0.1,
            "clipping and optimizer": 0.5,
            REST: 7.4,
        }
    )
    assert sum(parts.values()) == pytest.approx(110.0 - 100.0)


def test_only_this_stretch_counts() -> None:
    earlier = [{"event": "started", "time": 1.0}, _step(1, 5.0, 4.0, data_s=4.0), _step(2, 6.0, 1.0, data_s=1.0)]
    now = [{"event": "started", "time": 100.0}, _step(2, 103.0, 2.0, data_s=1.5)]
    assert budget(earlier + now) == pytest.approx(
        {"data": 1.5, "forward and backward": 0, "exposed communication": 0, "clipping and optimizer": 0, REST: 0.5}
    )


def test_a_run_of_no_steps() -> None:
    assert budget([{"event": "started", "time": 1.0}]) == {}
