"""The figures of a result: losses, speed, and the wall time by part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.training.result import REST, journal_figures

PARTS = ("data_s", "copy_s", "forward_s", "backward_s", "exposed_comm_s", "clip_s", "optimizer_s")


def _step(step: int, time: float, step_s: float, loss: float = 0.0, **parts: float) -> dict[str, Any]:
    line = {"step": step, "time": time, "step_s": step_s, "loss": loss, "tokens": 5}
    return {**line, **dict.fromkeys(PARTS, 0.0), **parts}


def _started(time: float = 0.0) -> dict[str, Any]:
    return {"event": "started", "time": time}


def _figures(path: Path, lines: list[dict[str, Any]], cut: str = "") -> dict[str, Any]:
    (path / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + cut)
    return journal_figures(path / "journal.jsonl")


def _budget(path: Path, lines: list[dict[str, Any]]) -> list[float]:
    parts: dict[str, float] = _figures(path, lines)["budget"]
    assert list(parts) == ["data", "forward and backward", "exposed communication", "clipping and optimizer", REST]
    return list(parts.values())


def test_of_steps_that_were_done_again_the_last_count(tmp_path: Path) -> None:
    first = [_started(), _step(1, 1.0, 7.0, 9.0), _step(2, 2.0, 1.0, 8.0), _step(3, 3.0, 1.0, 100.0)]
    again = [_started(), _step(3, 3.0, 2.0, 3.0), _step(4, 4.0, 0.5, 2.0), _step(5, 5.0, 0.5, 1.0)]
    found = _figures(tmp_path, first + again, '{"step": 9, "cut')
    assert (found["first_loss"], found["last_loss"]) == (9.0, pytest.approx((9 + 8 + 3 + 2 + 1) / 5))
    assert found["seconds"] == pytest.approx(3.0)
    assert found["tokens_per_s"] == pytest.approx(10.0), "of this stretch, without its first step"


def test_a_run_of_no_steps_has_no_figures(tmp_path: Path) -> None:
    found = _figures(tmp_path, [_started()])
    assert (found["first_loss"], found["last_loss"], found["tokens_per_s"], found["budget"]) == (None, None, None, {})


def test_the_parts_add_up_to_the_wall_time(tmp_path: Path) -> None:
    parts = _budget(
        tmp_path,
        [
            _started(90.0),
            {"event": "evaluation", "time": 99.0, "loss": 1.0, "metrics": {}},
            _step(1, 102.0, 2.0, data_s=0.25, copy_s=0.25, forward_s=0.5, backward_s=0.5, exposed_comm_s=0.1),
            _step(2, 104.0, 2.0, data_s=0.5, clip_s=0.2, optimizer_s=0.3),
            {"event": "checkpoint", "time": 109.0},
            {"event": "finished", "time": 110.0},
        ],
    )
    assert parts == pytest.approx([1.0, 1.0, 0.1, 0.5, 7.4])
    assert sum(parts) == pytest.approx(110.0 - 100.0)


def test_the_budget_is_of_the_last_start(tmp_path: Path) -> None:
    earlier = [_started(1.0), _step(1, 5.0, 4.0, data_s=4.0), _step(2, 6.0, 1.0, data_s=1.0)]
    now = [_started(100.0), _step(2, 103.0, 2.0, data_s=1.5)]
    assert _budget(tmp_path, earlier + now) == pytest.approx([1.5, 0, 0, 0, 0.5])
