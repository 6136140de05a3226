"""Real runs and what TensorBoard's reader finds of them: killed and resumed, without the library."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.observe.past_journal import read_steps
from tests.support.gallery import TOY
from tests.support.journals import read_journal
from tests.support.tensorboard_run import read
from tests.support.thread_job import train_on_threads

pytest.importorskip("tensorboard", reason="tensorboard is not installed: make setup")


def _train(folder: Path, *options: str) -> None:
    train_on_threads(*TOY, "--train.steps=40", "--checkpoint.every=8", *options, f"--run_dir={folder / 'run'}", size=2)


def test_a_given_peak_gives_the_use_of_flops(tmp_path: Path) -> None:
    for stop in (24, 40):
        _train(tmp_path, "--observe.peak_tflops=0.001", f"--train.stop_at={stop}")
    found = read(tmp_path / "run" / "tensorboard")
    assert "speed/flops_utilisation_percent" in found.Tags()["scalars"]
    events = {line["event"] for line in read_journal(tmp_path / "run" / "journal.jsonl") if "event" in line}
    assert "flops" in events


def test_without_the_library_the_run_continues_and_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hvdtrain.observe.tensorboard.find_spec", lambda name: None)
    _train(tmp_path, "--train.steps=3")
    assert 'pip install "hvdtrain[tensorboard]"' in capsys.readouterr().out
    assert max(read_steps(tmp_path / "run/journal.jsonl")) == 3
    assert not (tmp_path / "run" / "tensorboard").exists()
