from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.training.result import journal_figures

PARTS = ("data_s", "copy_s", "forward_s", "backward_s", "exposed_comm_s", "clip_s", "optimizer_s")


def _step(step: int, loss: float, step_s: float = 1.0) -> dict[str, Any]:
    return {"step": step, "loss": loss, "time": float(step), "step_s": step_s, "tokens": 5, **dict.fromkeys(PARTS, 0)}


def _figures(folder: Path, lines: list[dict[str, Any]]) -> dict[str, Any]:
    path = folder / "journal.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 9, "cut')
    return journal_figures(path)


def test_of_steps_that_were_done_again_the_last_count(tmp_path: Path) -> None:
    started = {"event": "started", "time": 0.0}
    first = [started, _step(1, 9.0, 7.0), _step(2, 8.0), _step(3, 100.0)]
    again = [started, _step(3, 3.0, 2.0), _step(4, 2.0, 0.5), _step(5, 1.0, 0.5)]
    found = _figures(tmp_path, first + again)
    assert (found["first_loss"], found["last_loss"]) == (9.0, pytest.approx((9 + 8 + 3 + 2 + 1) / 5))
    assert found["seconds"] == pytest.approx(3.0)
    assert found["tokens_per_s"] == pytest.approx(10.0), "of this stretch, without its first step"


def test_a_run_of_nothing(tmp_path: Path) -> None:
    found = _figures(tmp_path, [{"event": "started", "time": 0.0}])
    assert (found["first_loss"], found["last_loss"], found["tokens_per_s"], found["budget"]) == (None, None, None, {})
