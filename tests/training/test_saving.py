"""Saving beside training, in whole runs: a disk that is full costs checkpoints, not the run."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

import hvdtrain
from hvdtrain.errors import CheckpointError
from hvdtrain.observe.journal import read_journal, read_steps
from hvdtrain.state import attempt, writer
from hvdtrain.state.store import CheckpointStore, load
from hvdtrain.training import saving
from tests.support.toy import toy

TRAIN = {"steps": 12, "global_batch": 4, "micro_batch": 2, "eval_every": 100}


def _fail(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """The disk is full for so many saves."""
    real, left = attempt.write_shard, [times]

    def write(*arguments: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments)

    monkeypatch.setattr(attempt, "write_shard", write)


def _events(run: Path) -> list[tuple[str, int]]:
    lines = read_journal(run / "journal.jsonl")
    return [(line["event"], line["at_step"]) for line in lines if "checkpoint" in line.get("event", "")]


def test_a_full_disk_ends_no_training_and_changes_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"train": TRAIN, "checkpoint": {"every": 4}}
    hvdtrain.train({**options, "run_dir": str(tmp_path / "whole")}, toy)
    _fail(monkeypatch, 1)
    result = hvdtrain.train({**options, "run_dir": str(tmp_path / "full")}, toy)
    assert result.reason == "finished"
    assert _events(tmp_path / "full") == [("checkpoint_failed", 4), ("checkpoint", 8), ("checkpoint", 12)]
    whole, full = (read_steps(tmp_path / name / "journal.jsonl") for name in ("whole", "full"))
    assert [line["loss"] for line in whole.values()] == [line["loss"] for line in full.values()]


def test_a_failed_save_is_tried_again_before_the_next_is_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fail(monkeypatch, 1)
    monkeypatch.setattr(writer, "_FIRST_RETRY_S", 0.0)
    hvdtrain.train({"train": {**TRAIN, "steps": 40}, "checkpoint": {"every": 20}, "run_dir": str(tmp_path)}, toy)
    failed, again, *rest = _events(tmp_path)
    assert failed == ("checkpoint_failed", 20)
    assert again[0] == "checkpoint" and 20 < again[1] < 40
    assert rest == [("checkpoint", 40)]


def test_a_last_save_that_fails_is_told_by_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fail(monkeypatch, 9)
    monkeypatch.setattr(saving, "WAITS_S", ())
    with pytest.raises(CheckpointError, match="step 12 could not be written: No space left on device"):
        hvdtrain.train({"train": TRAIN, "checkpoint": {"every": 0}, "run_dir": str(tmp_path)}, toy)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_last_save_waits_for_somebody_to_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fail(monkeypatch, 3)
    slept: list[float] = []
    monkeypatch.setattr(saving, "WAITS_S", (1.0, 2.0, 4.0, 8.0))
    monkeypatch.setattr(saving.time, "sleep", slept.append)
    result = hvdtrain.train({"train": TRAIN, "checkpoint": {"every": 0}, "run_dir": str(tmp_path)}, toy)
    assert result.reason == "finished"
    assert sum(slept) == 1.0 + 2.0 + 4.0
    assert _events(tmp_path) == [("checkpoint", 12)]
    warnings = [line["text"] for line in read_journal(tmp_path / "journal.jsonl") if line.get("event") == "warning"]
    assert [text.endswith(f"the next try comes in {s} s") for text, s in zip(warnings, (1, 2, 4), strict=True)] == [
        True
    ] * 3


def test_every_save_of_a_run_is_whole_and_of_its_step(tmp_path: Path) -> None:
    options = {"train": TRAIN, "checkpoint": {"every": 1, "keep": 99}, "run_dir": str(tmp_path)}
    hvdtrain.train(options, toy)
    store = CheckpointStore(tmp_path / "checkpoints", pytest.fail)
    saved = store.list()
    assert [one.step for one in saved] == list(range(1, 13))
    assert _events(tmp_path) == [("checkpoint", one.step) for one in saved]
    progress = [load(one.path).values["progress"] for one in saved]
    assert [(p["step"], p["position"]) for p in progress] == [(step, 4 * step) for step in range(1, 13)]
