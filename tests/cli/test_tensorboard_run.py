"""Real runs and what TensorBoard's reader finds of them: killed and resumed, with histograms, without the library."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from hvdtrain.observe.journal import read_journal, read_steps
from hvdtrain.observe.scalars import BANDS
from tests.support.launch import train
from tests.support.tensorboard_run import read, series, single

pytest.importorskip("tensorboard", reason="tensorboard is not installed: make setup")

ROOT = Path(__file__).parents[2]
OPTIONS = [
    "--run_dir=run",
    "--train.steps=40",
    "--train.global_batch=4",
    "--train.micro_batch=4",
    "--checkpoint.every=8",
]
TASK = """
import os, signal
from dataclasses import replace
from tests.support.toy import toy

def build():
    task, left = toy(), [int(os.environ.get("DIE_AFTER", "-1"))]
    def loss(model, batch):
        left[0] -= model.training
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return task.loss(model, batch)
    return replace(task, loss=loss)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "dying.py").write_text(TASK)
    return tmp_path


def _train(folder: Path, *options: str, die_after: int = -1, check: bool = True, path: str = str(ROOT)) -> str:
    environment = {"DIE_AFTER": str(die_after), "PYTHONPATH": path}
    done = train("--task=dying.py:build", *OPTIONS, *options, size=1, cwd=folder, environment=environment, check=check)
    assert check or done.returncode == -signal.SIGKILL
    return done.stdout + done.stderr


def test_killed_and_resumed_nothing_is_twice_and_nothing_lost(folder: Path) -> None:
    for die_after in (21, 15):
        _train(folder, die_after=die_after, check=False)
    out = _train(folder)
    assert "sink" not in out, out
    written, steps = folder / "run" / "tensorboard", read_steps(folder / "run" / "journal.jsonl")
    assert sorted(steps) == list(range(1, 41))
    shown = series(written, "loss/train")
    assert {1, 40} <= shown.keys()
    for saved in (8, 16, 24, 32):  # a point comes with each checkpoint once that is on the disk: before the next begins
        assert any(saved <= step <= saved + 8 for step in shown), shown.keys()
    assert shown == {n: single(steps[n]["loss"]) for n in shown}
    by_samples = series(written / "by_samples", "loss_by_samples/train")
    assert by_samples == {4 * n: loss for n, loss in shown.items()}
    series(written / "by_seconds", "loss_by_seconds/train")
    assert list(series(written, "loss/heldout")) == [0, 8, 16, 24, 32, 40]
    assert series(written, "speed/tflops_per_s").keys() == shown.keys()
    for band in BANDS:
        assert series(written / "step" / band, "step_stacked_ms/to").keys() == shown.keys()


@pytest.mark.slow
def test_histograms_on_request_and_not_in_the_journal(folder: Path) -> None:
    for stop in (24, 40):
        _train(folder, "--observe.histograms_every=16", "--observe.peak_tflops=0.001", f"--train.stop_at={stop}")
    found = read(folder / "run" / "tensorboard" / "histograms")
    for tag in ("parameters/layers.0.weight", "gradients/layers.0.weight"):
        assert [(event.step, event.histogram_value.num) for event in found.Histograms(tag)] == [(16, 96), (32, 96)]
    found = read(folder / "run" / "tensorboard")
    assert "speed/flops_utilisation_percent" in found.Tags()["scalars"]
    events = {line["event"] for line in read_journal(folder / "run" / "journal.jsonl") if "event" in line}
    assert "histograms" not in events
    assert "flops" in events


def test_turned_off(folder: Path) -> None:
    _train(folder, "--observe.tensorboard=false")
    assert not (folder / "run" / "tensorboard").exists()


def test_without_the_library_the_run_goes_on_and_says_what_to_install(folder: Path) -> None:
    (folder / "hide").mkdir()
    (folder / "hide" / "sitecustomize.py").write_text(
        "import importlib.util as u\nreal = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'tensorboard' else real(name, *a)\n"
    )
    out = _train(folder, path=os.pathsep.join([str(folder / "hide"), str(ROOT)]))
    assert 'pip install "hvdtrain[tensorboard]"' in out
    assert "finished at step 40 of 40" in out
    assert not (folder / "run" / "tensorboard").exists()
