from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from runpy import run_path

import pytest

from tests.support.gallery import LANGUAGE
from tests.support.journals import read_events
from tests.support.launch import ENVIRONMENT, ROOT, TIMEOUT_S

optuna = pytest.importorskip("optuna", reason="optuna is not installed: make setup")
TUNE = ROOT / "examples" / "tune.py"


@pytest.mark.slow
def test_a_search_continues_with_the_trial_that_was_killed(tmp_path: Path) -> None:
    (tmp_path / "tune").mkdir()
    study = optuna.create_study(storage=f"sqlite:///{tmp_path}/tune/study.db", study_name="tune")
    run_path(str(TUNE))["suggest"](study.ask())
    for trials in (1, 2):
        argv = [sys.executable, str(TUNE), str(trials), *LANGUAGE, "--train.steps=2"]
        environ = {**ENVIRONMENT, "PYTHONPATH": str(ROOT)}
        subprocess.run(argv, cwd=tmp_path, env=environ, stdout=subprocess.DEVNULL, timeout=TIMEOUT_S, check=True)
    killed, repeated, last = study.get_trials()
    assert killed.state.name == "FAIL" and repeated.params == killed.params != last.params
    losses = [read_events(run, "evaluation")[-1]["loss"] for run in (tmp_path / "tune").glob("*=*")]
    assert sorted(losses) == sorted([repeated.value, last.value])
