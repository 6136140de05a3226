"""A search: the best value is found, kills lose no trial, hopeless trials end early, and failed ones are named."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from hvdtrain.cli.tune import main
from hvdtrain.config.schema import Config
from hvdtrain.errors import ConfigError, RunDirectoryError
from hvdtrain.tune import study
from hvdtrain.tune.space import parse_space
from hvdtrain.tune.study import EARLY, Tried, best_yaml, search, table
from tests.support.gallery import LANGUAGE
from tests.support.journals import read_events
from tests.support.launch import TIMEOUT_S

pytest.importorskip("optuna", reason="optuna is not installed")

TRAINS = """
import json, pathlib, sys, time
given = dict(word[2:].split("=") for word in sys.argv[1:])
x, run = float(given["x"]), pathlib.Path(given["run_dir"])
if x > 8:
    sys.exit("no")
losses = [(x - 3) ** 2 + 10 / step for step in (1, 2, 3)]
with (run / "journal.jsonl").open("a") as file:
    for step, loss in enumerate(losses, 1):
        print(json.dumps({"step": step, "loss": 0, "step_s": x}), file=file)
        print(json.dumps({"event": "evaluation", "at_step": step, "loss": loss}), file=file, flush=True)
    if "hang" in given and x > 6 and list(run.parent.glob("*/done")):
        time.sleep(1000)
    print(json.dumps({"event": "finished"}), file=file)
(run / "done").touch()
"""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(study, "_POLL_S", 0.01)
    (tmp_path / "trains.py").write_text(TRAINS)
    return [sys.executable, "-IS", str(tmp_path / "trains.py")]


def _search(command: Sequence[str], trials: int, over: str = "x=0:8", measure: str = "loss") -> list[Tried]:
    folder, space = Path(command[2]).parent / "tune", parse_space(over, Config(), 1)
    return search(folder, space, command, trials=trials, measure=measure, seed=0, say=lambda text: None)


def _train_at_once(trial: object, argv: Sequence[str], run: Path, measure: str) -> tuple[float, str]:
    """Instead of a process."""
    x = next(float(word.partition("=")[2]) for word in argv if word.startswith("--x="))
    return (x - 3) ** 2, ""


def test_the_best_value_is_found(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "_train", _train_at_once)
    found = _search(command, 14)
    assert len(found) == 14 and not any(each.why for each in found)
    best = min(found, key=lambda each: each.value or 0.0)
    assert abs(best.values["x"] - 3) <= 1
    assert table(found, "loss")[1].split()[1] == f"--x={best.values['x']}"


@pytest.mark.parametrize("measure", ["step_s", "loss"])
def test_the_measure_of_a_trial_is_read_from_its_journal(measure: str, command: list[str]) -> None:
    found = _search(command, 2, "x=1|2", measure)
    for x, value in ((float(each.values["x"]), each.value) for each in found):
        assert value == pytest.approx(x if measure == "step_s" else (x - 3) ** 2 + 10 / 3)


def test_an_interrupted_search_continues(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Path] = []

    def interrupted(trial: object, argv: Sequence[str], run: Path, measure: str) -> tuple[float, str]:
        begun.append(run)
        if len(begun) == 3:
            raise KeyboardInterrupt
        return _train_at_once(trial, argv, run, measure)

    monkeypatch.setattr(study, "_train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _search(command, 5, "x=0.5:7.5")
    found = _search(command, 5, "x=0.5:7.5")
    assert [each.folder for each in found] == [*begun[:2], *begun[3:]]
    assert begun[3] == begun[2] and len(set(begun)) == 5
    assert _search(command, 5, "x=0.5:7.5") == found and len(begun) == 6


def test_hopeless_trials_end_early(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those above 6 would never end, but the first."""
    monkeypatch.setattr(study, "_RANDOM", 1)
    found = _search([*command, "--hang=yes"], 10)
    stopped = [each for each in found if each.why]
    assert {(each.why, each.value) for each in stopped} == {(EARLY, None)}
    assert all(each in stopped for each in found[1:] if each.values["x"] > 6)


def test_failed_trials_are_named(command: list[str]) -> None:
    found = _search(command, 2, "x=9|10")
    assert {each.value for each in found} == {None}
    assert all("failed with exit code 1, see" in each.why for each in found)
    assert best_yaml(found, "loss") is None


def test_another_search_in_the_folder_is_refused(command: list[str]) -> None:
    _search(command, 0)
    for word, how in (("space", {"over": "x=0:7"}), ("measure", {"measure": "step_s"})):
        with pytest.raises(RunDirectoryError, match=f"another {word}"):
            _search(command, 0, **how)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--over", "optimizer.lrr=1:2"), "optimizer.lrr"),
        (("--over", "optimizer.name=adamw|nothing"), "nothing"),
        (("--over", "optimizer.lr", "--optimizer.lr=1"), "--optimizer.lr"),
        (("--over", "optimizer.lr", "--run_dir=x"), "--run_dir"),
    ],
)
def test_wrong_options_are_refused_before_the_first_trial(
    argv: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        main([*argv])
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    """It leaves a config that trains, and TensorBoard's HParams."""
    argv = [sys.executable, "-m", "hvdtrain", "tune", "--over", "optimizer.lr=1e-3:1e-2", "--trials", "2", *LANGUAGE]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert "written: tune/best.yaml" in done.stdout
    assert len(list((tmp_path / "tune" / "tensorboard").glob("trial-*/events*"))) == 2
    argv = [*argv[:3], "train", "--config", "tune/best.yaml", "--run_dir", "again"]
    subprocess.run(argv, cwd=tmp_path, env=environ, capture_output=True, timeout=TIMEOUT_S, check=True)
    best = min(float(line.split()[1]) for line in (tmp_path / "tune" / "best.yaml").read_text().splitlines()[2:4])
    assert read_events(tmp_path / "again", "evaluation")[-1]["loss"] == pytest.approx(best, abs=1e-3)
