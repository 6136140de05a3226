"""Stamps of real jobs: every step of every rank, each start, and Horovod's own times beside ours."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hvdtrain.observe.journal import read_steps as read_journal_steps
from hvdtrain.timeline.span_files import read_span_files, wall_clock_us
from hvdtrain.timeline.steps import read_starts, read_steps
from tests.support.launch import train
from tests.support.span_files import read_spans

TOY = [
    f"--task={Path(__file__).parents[1]}/support/toy.py:toy",
    "--train.global_batch=8",
    "--train.micro_batch=2",
    "--run_dir=run",
    "--checkpoint.every=20",
    "--train.steps=60",
]


@pytest.mark.parametrize(
    "launcher", ["mpirun", *(pytest.param(name, marks=pytest.mark.slow) for name in ("none", "horovodrun --gloo"))]
)
def test_every_step_of_every_rank_is_there_start_after_start(launcher: str, tmp_path: Path) -> None:
    size = 1 if launcher == "none" else 2
    train(*TOY, "--train.stop_at=25", size=size, launcher=launcher, cwd=tmp_path)
    train(*TOY, size=size, launcher=launcher, cwd=tmp_path)
    first, second = read_starts(tmp_path / "run")
    assert first.steps.step.tolist() == list(range(1, 26)) and second.steps.step.tolist() == list(range(26, 61))
    assert (first.number, second.number, second.at_step) == (0, 1, 25)
    assert first.dropped == second.dropped == []
    journal = read_journal_steps(tmp_path / "run/journal.jsonl")
    for start in (first, second):
        table = start.steps
        assert table.start_us.shape == (size, len(table.step))
        assert (table.start_us < table.ready_us).all() and (table.ready_us <= table.released_us).all()
        assert (table.released_us < table.end_us).all()
        assert (table.start_us[:, 1:] >= table.end_us[:, :-1]).all()
        # Nobody has the sums before everybody is ready to send, by one clock: what each rank waits for.
        sent = table.ready_us - 1e3  # a rank may be put aside between handing over its last gradient and its stamp
        assert (table.released_us >= sent.max(axis=0)).all()
        step_s = [journal[step]["step_s"] for step in table.step.tolist()]
        assert np.allclose((table.end_us - table.start_us)[0] / 1e6, step_s, atol=5e-3)
        assert table.clock_error_us.tolist() == [0] * size
        assert [bool(nbytes) for nbytes, _ in start.link] == [True] * len(start.link) and bool(start.link) == (size > 1)
        assert all(len(facts["cpu_wait_us"]) == size for facts in table.facts)
        inside = sum(table.parts_us[name] for name in table.parts_us if name not in ("aside", "gc"))
        assert (inside <= table.end_us - table.start_us + 1).all()
    aside = dict(zip(second.steps.step.tolist(), second.steps.parts_us["aside"][0].tolist(), strict=True))
    assert aside[41] > 0 and aside[42] == 0
    assert [spans.rank for spans in read_spans(tmp_path / "run")] == list(range(size))


def test_off_means_none(tmp_path: Path) -> None:
    train(*TOY, "--observe.timeline=off", size=2, cwd=tmp_path)
    assert read_steps(tmp_path / "run") == [] and not (tmp_path / "run/timeline/steps.jsonl").exists()


def test_horovods_own_times_lie_inside_of_ours(tmp_path: Path) -> None:
    """On rank 0's clock, put there by the pair of times in its span file."""
    train(*TOY, "--observe.timeline=10:30", size=2, cwd=tmp_path)
    (file,) = (tmp_path / "run/timeline").glob("horovod-*")
    epoch_us, reductions = _horovods(file)
    wall_us = wall_clock_us(read_span_files(tmp_path / "run"))
    assert wall_us is not None
    spans = read_spans(tmp_path / "run")[0]
    assert len(spans.buckets) == 2
    for track, bucket in spans.buckets.items():
        mine = (spans.track == track) & (spans.step >= 10) & (spans.step <= 30)
        theirs = np.array(reductions[f"allreduce.{bucket.name}"]) + (epoch_us - wall_us)
        assert len(theirs) == mine.sum() == 21
        assert (spans.start_us[mine] - 200 <= theirs[:, 0]).all()
        assert (theirs[:, 1] <= spans.end_us[mine] + 200).all()


def _horovods(file: Path) -> tuple[float, dict[str, list[tuple[float, float]]]]:
    """The wall clock at time 0 in microseconds, and begin and end of each ALLREDUCE by tensor."""
    epoch_us, names = 0.0, {}
    open_: dict[int, list[tuple[str, float]]] = {}
    found: dict[str, list[tuple[float, float]]] = {}
    for event in json.loads(file.read_text()):
        if event["ph"] == "M":
            epoch_us = event["args"].get("start_time_since_epoch_in_micros", epoch_us)
            names.setdefault(event["pid"], event["args"].get("name"))
        elif event["ph"] == "B":
            open_.setdefault(event["pid"], []).append((event["name"], event["ts"]))
        elif event["ph"] == "E" and open_.get(event["pid"]):
            name, began = open_[event["pid"]].pop()
            if name == "ALLREDUCE":
                found.setdefault(names[event["pid"]], []).append((began, event["ts"]))
    return epoch_us, found
