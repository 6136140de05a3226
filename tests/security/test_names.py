"""Names that a shell would take for something else: they stay names, wherever they come from."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.__main__ import main
from hvdtrain.observe.past_journal import read_steps
from hvdtrain.observe.shell_commands import resume_command
from hvdtrain.runtime.environment import RankInfo
from tests.support.audited import audited, seen
from tests.support.journals import read_journal
from tests.support.launch import ENVIRONMENT, ROOT, TIMEOUT_S, train

SUPPORT = ROOT / "tests" / "support"
NASTY = "-a 'b\" $(touch owned) `touch owned`;touch owned\n&& touch owned #é *"
OPTIONS = ("--train.steps=4", "--train.global_batch=8", "--train.micro_batch=2")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the files are; relative to it their names begin with a dash."""
    (tmp_path / NASTY).mkdir()
    shutil.copy(SUPPORT / "toy.py", tmp_path / f"{NASTY}.py")
    return tmp_path


def _untouched(folder: Path) -> bool:
    return not list(folder.rglob("owned"))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.slow
def test_a_run_and_a_task_of_any_name(folder: Path, size: int) -> None:
    audit, run = folder / "audit", Path(NASTY) / "run"
    options = (f"--task={NASTY}.py:toy", f"--run_dir={run}", *OPTIONS)
    for stop_at in ("2", "null"):
        train(*options, f"--train.stop_at={stop_at}", size=size, cwd=folder, environment=audited(audit))
    assert list(read_steps(folder / run / "journal.jsonl")) == [1, 2, 3, 4]
    assert "resumed" in [line.get("event") for line in read_journal(folder / run / "journal.jsonl")]
    assert _untouched(folder)
    assert seen(audit, "os.system") == seen(audit, "subprocess.Popen") == []


@pytest.mark.slow
def test_the_command_that_is_shown_can_be_pasted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)  # it is for who is there
    train(f"--task={NASTY}.py:toy", f"--run_dir={NASTY}/run", "--train.stop_at=2", *OPTIONS, cwd=folder)
    command = resume_command(Path(NASTY) / "run", RankInfo(), "--train.stop_at null")
    done = subprocess.run(
        ["/bin/sh", "-c", command],
        cwd=folder,
        env={**ENVIRONMENT, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    assert list(read_steps(folder / NASTY / "run/journal.jsonl")) == [1, 2, 3, 4]
    assert _untouched(folder) and shlex.split(command)


@pytest.mark.parametrize("value", ["$(touch owned)", "-x", "a b", "'", '"', "\n", "!!python/name:os.system", "\udcff"])
def test_an_invalid_value_is_reported_and_never_run(
    value: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert main(["--precision", value]) == 2
    assert "precision" in capsys.readouterr().err
    assert _untouched(folder)


def test_arguments_reach_ranks_of_launch_as_they_are(folder: Path) -> None:
    arguments = [NASTY, "--", "", "-np", "a\tb", "\udcff", "$HOME", "%s"]
    launch = [sys.executable, SUPPORT / "fake_launch.py", SUPPORT / "visiting_rank.py", "-np", "1", "--", "argv"]
    variables = {**ENVIRONMENT, **audited(folder / "audit")}
    done = subprocess.run(
        [*launch, *arguments], cwd=folder / NASTY, env=variables, capture_output=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if b"ARGV" in line]
    assert json.loads(line.split(b"ARGV ")[1]) == {"argv": arguments, "cwd": str(folder / NASTY)}
    assert _untouched(folder)
    assert seen(folder / "audit", "subprocess.Popen") == []


@pytest.mark.parametrize(
    "host", ["$(touch owned)", "-oProxyCommand=touch owned", "a b", "a;b", "a\nb", "`x`", "a'b", ""]
)
def test_a_host_that_is_no_name_is_refused_before_anything_starts(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[object] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", lambda *argv, **how: started.append(argv))
    assert main(["launch", "--to", "hvdtrain", "-np", "1", "-H", f"{host}:1", "--", "--train.steps=1"]) == 2
    assert "host" in capsys.readouterr().err
    assert started == [] and _untouched(tmp_path)
