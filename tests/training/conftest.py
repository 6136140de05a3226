"""What whole runs in this process need."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.observe import sinks, step_stamps
from tests.support.gallery import Recorded
from tests.support.launch import TIMEOUT_S
from tests.support.thread_job import train_on_threads


@pytest.fixture(autouse=True)
def _no_slow_sink_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "_CLOSE_TIMEOUT_S", TIMEOUT_S)
    monkeypatch.setattr(sinks, "_CLOSE_TIMEOUT_AFTER_FAILURE_S", TIMEOUT_S)
    monkeypatch.setattr(step_stamps, "_PATIENCE_S", TIMEOUT_S)
    monkeypatch.setattr(step_stamps, "_PATIENCE_WHEN_FAILED_S", TIMEOUT_S)


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def trained(tmp_path: Path) -> Callable[..., Recorded]:
    """Train with the options of a command line on `size` threads, in a subfolder `name`; return what is left there."""

    def train(name: str, *options: str, size: int, **how: Any) -> Recorded:
        train_on_threads(*options, f"--run_dir={tmp_path / name / 'run'}", size=size, **how)
        return Recorded(tmp_path / name, 0, "", "")

    return train
