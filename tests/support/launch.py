"""Starting real jobs from tests."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from hvdtrain.install.versions import REMOTE_SHELL, has_remote_shell
from hvdtrain.observe.past_journal import AFTER_END
from tests.support.journals import read_journal
from tests.support.warm import is_warm, warm_python

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 580
"""After which a job that does not end is given up: a guard, not a judgement of speed."""

_OWN = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "PMI_", "HOROVOD_"))}
ENVIRONMENT = {
    **_OWN,
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "default",
    **({} if has_remote_shell(_OWN) else dict.fromkeys(REMOTE_SHELL, "/bin/false")),
}


def program(name: str) -> str:
    """The path of a program beside this Python or on PATH."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        if "CI" in os.environ:
            pytest.fail(f"{name} is missing, which set-up installs")
        pytest.skip(f"{name} is not installed: make setup")
    return found


def command(size: int, *, launcher: str = "mpirun") -> list[str]:
    """What starts `size` ranks; nothing for `launcher` "none"."""
    if launcher == "none":
        return []
    if launcher == "mpirun":
        return [program("mpirun"), "-np", str(size), "--oversubscribe"]
    if launcher == "horovodrun":
        return [program("horovodrun"), "-np", str(size), "-H", f"localhost:{size}"]
    if launcher == "torchrun":
        # --standalone: a free port. --no-python: a Python and its arguments follow.
        return [program("torchrun"), "--standalone", "--nproc-per-node", str(size), "--no-python"]
    assert launcher == "horovodrun --gloo"
    return [program("horovodrun"), "--gloo", "-np", str(size), "-H", f"localhost:{size}"]


def run(
    arguments: Sequence[str],
    *,
    size: int = 1,
    launcher: str | None = None,
    cwd: Path,
    environment: Mapping[str, str] | None = None,
    check: bool = True,
    without: Sequence[str] = (),
    forks: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run ``python ARGUMENTS`` on `size` ranks and wait, less the variables `without`; hvdtrain in `forks`."""
    chosen = launcher or ("none" if size == 1 else "mpirun")
    path = os.pathsep.join([str(Path(sys.executable).parent), ENVIRONMENT.get("PATH", "")])
    variables = {**ENVIRONMENT, "PATH": path, **(environment or {})}
    forks &= (arguments[0].endswith(".py") or arguments[:2] == ["-m", "hvdtrain"]) and is_warm(environment or {})
    python = warm_python() if forks and not without else [sys.executable]
    done = subprocess.run(
        [*command(size, launcher=chosen), *python, *arguments],
        cwd=cwd,
        env={k: v for k, v in variables.items() if k not in without},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert not check or done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def ending(journal: Path) -> dict[str, Any]:
    """The last line of a run's journal but for those that may follow its end."""
    return next(line for line in reversed(read_journal(journal)) if line.get("event") not in AFTER_END)


def train(*options: str, size: int = 1, **how: object) -> subprocess.CompletedProcess[str]:
    """Run ``python -m hvdtrain OPTIONS`` on `size` ranks and wait."""
    return run(["-m", "hvdtrain", *options], size=size, **how)  # type: ignore[arg-type]


@contextmanager
def training(
    *options: str,
    size: int,
    cwd: Path,
    after: int = 1,
    environment: Mapping[str, str] | None = None,
    forks: bool = True,
) -> Iterator[subprocess.Popen[str]]:
    """Train on `size` ranks from when a line has told of step `after`; what comes then is read by who wants it."""
    path = os.pathsep.join([str(Path(sys.executable).parent), ENVIRONMENT.get("PATH", "")])
    python = warm_python() if forks and is_warm(environment or {}) else [sys.executable]
    with subprocess.Popen(
        [*command(size, launcher="none" if size == 1 else "mpirun"), *python, "-m", "hvdtrain", *options],
        cwd=cwd,
        env={**ENVIRONMENT, "PATH": path, **(environment or {})},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        steps = (line for line in process.stdout if line.startswith("step"))
        while int(next(steps).split("/")[0].split()[1]) < after:
            pass
        yield process


def stop_by_sigterm(process: subprocess.Popen[str]) -> str:
    """End a job by a signal to one of its ranks; what it still says.

    Not to mpirun, which would kill all of them a second later, done or not.
    """
    assert process.stdout is not None
    job = psutil.Process(process.pid)
    ranks = (p for p in [job, *job.children(recursive=True)] if "mpirun" not in p.cmdline()[0])
    next(p for p in ranks if ["-m", "hvdtrain"] in (p.cmdline()[1:3], p.cmdline()[4:6])).send_signal(signal.SIGTERM)
    return process.stdout.read()
