"""Output never ends a run, and what it shows to be typed again is safe to paste: by the real command."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.observe.past_journal import read_steps
from tests.support.gallery import TOY
from tests.support.launch import ENVIRONMENT, ROOT

pytestmark = pytest.mark.slow

COMMAND = shlex.join([sys.executable, "-m", "hvdtrain", *TOY[:3], "--train.steps=6", "--checkpoint.every=0"])


def _shell(line: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    argv = ["bash", "-o", "pipefail", "-c", line]
    environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", **variables}
    return subprocess.run(argv, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("where", [">/dev/full", ">/dev/full 2>/dev/full", ">&-", ">&- 2>&-", "| head -n 1", "| true"])
def test_a_run_does_not_need_its_output(where: str, tmp_path: Path) -> None:
    done = _shell(f"{COMMAND} --run_dir=run {where}", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(read_steps(tmp_path / "run/journal.jsonl")) == 6


def test_an_error_keeps_its_exit_code_without_output(tmp_path: Path) -> None:
    for where in (">/dev/full 2>/dev/full", ">&- 2>&-"):
        assert _shell(f"{COMMAND} --run_dir=run --train.steps=0 {where}", tmp_path).returncode == 2


def test_a_name_that_the_terminal_cannot_show_ends_nothing(tmp_path: Path) -> None:
    done = _shell(f"{COMMAND} --run_dir=läufe", tmp_path, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert done.returncode == 0, done.stderr
    assert "l\\xe4ufe" in done.stdout


def test_commands_that_are_shown_run_nothing_that_a_name_hides(tmp_path: Path) -> None:
    name = "x; touch pasted; echo 'y"
    done = _shell(f"{COMMAND} --run_dir={shlex.quote(name)}", tmp_path)
    assert done.returncode == 0, done.stderr
    further = done.stdout.partition("\nnext:")[2].strip().splitlines()
    for label in ("curves", "last steps", "train longer"):
        (line,) = [line.strip().removeprefix(label).strip() for line in further if line.strip().startswith(label)]
        words = shlex.split(line)
        assert any(name in word for word in words), line
        assert not any(";" in word and name not in word for word in words)
