"""Starts pytest as `tests.runner` needs it: on two ranks, or with a process for each core; again where tests failed."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from hvdtrain.install.versions import NO_SHELL, REMOTE_SHELL, ROOT_MAY_RUN, has_remote_shell
from tests.runner.results import FAILED, Outcome, cut_off, read_results

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "tests"
PARALLEL = "tests/parallel"
"""Tests that run on two ranks, too."""
_MOST_PROCESSES = 8
_SILENT_S = 900.0
"""Longer than the timeout of a test in setup.cfg."""
_LOOK_S = 5.0
_MEMORY = "/dev/shm"
_LEAST_BYTES = 6 << 30
_numbers = count(1)


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a process of tests.

    Bytecode is written, in a folder of its own: else each of the thousands of processes compiles the package, and
    each run of pytest rewrites all files of tests.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', '')}"
    own = {"OMP_NUM_THREADS": "1", "PYTHONPYCACHEPREFIX": str(ROOT / "build" / "pycache"), "PATH": path}
    return {name: value for name, value in environment.items() if name != "PYTHONDONTWRITEBYTECODE"} | own


def mpirun_variables() -> dict[str, str]:
    """Return what mpirun needs besides: as root, and where there is no ssh."""
    return ROOT_MAY_RUN | ({} if has_remote_shell(os.environ) else dict.fromkeys(REMOTE_SHELL, NO_SHELL))


@contextmanager
def temporary_in_memory() -> Iterator[None]:
    """Keep temporary files in memory meanwhile, where it is large and may have programs.

    Where a disk discards each removed file at once, as in many virtual machines, removing those of `make test` takes a
    minute. They take half a GiB.
    """
    if not _memory_is_large():
        yield
        return
    before = {"TMPDIR": os.environ["TMPDIR"]} if "TMPDIR" in os.environ else {}
    with tempfile.TemporaryDirectory(prefix="t-", dir=_MEMORY, ignore_cleanup_errors=True) as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        try:
            yield
        finally:
            del os.environ["TMPDIR"]
            os.environ.update(before)
            tempfile.tempdir = None


def _memory_is_large() -> bool:
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists() or not os.access(_MEMORY, os.W_OK):
        return False
    facts = os.statvfs(_MEMORY)
    available = [int(line.split()[1]) for line in meminfo.read_text().splitlines() if "MemAvailable" in line]
    least = min(facts.f_bavail * facts.f_frsize, *(1024 * kib for kib in available))
    return least >= _LEAST_BYTES and not facts.f_flag & os.ST_NOEXEC


def on_two_ranks(*, listed: Iterable[str] | None = None, until: float | None = None) -> dict[str, Outcome]:
    """Run `PARALLEL`, or those `listed`, on two ranks."""
    command = ["mpirun", "-np", "2", sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    return _run([*command, *([PARALLEL] if listed is None else [])], listed, until, mpirun_variables(), ranks=2)


def on_all_cores(*options: str, more: int = 0, until: float | None = None) -> dict[str, Outcome]:
    """Run the tests that `options` of pytest choose, a process for each core, and `more`."""
    number = min(len(os.sched_getaffinity(0)), _MOST_PROCESSES) + more
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(number), "--dist=loadgroup", "--no-loadscope-reorder"]
    return _run([*command, "--durations=25", "--durations-min=3", *options], None, until, {})


def alone(listed: Iterable[str], *, until: float | None = None) -> dict[str, Outcome]:
    """Run those tests in one process, with a gallery of its own."""
    return _run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"], listed, until, {})


def _run(
    command: list[str], listed: Iterable[str] | None, until: float | None, more: Mapping[str, str], *, ranks: int = 1
) -> dict[str, Outcome]:
    """Run it until it ends, or is killed at the time `until`, which is no failure of the tests that it was in.

    A test without an outcome has failed otherwise.
    """
    BUILD.mkdir(parents=True, exist_ok=True)
    number = next(_numbers)
    results = BUILD / f"results-{number}.jsonl"
    files = [results, *(results.with_name(f"{results.name}.rank{rank}") for rank in range(1, ranks))]
    for file in files:
        file.unlink(missing_ok=True)
    names = None if listed is None else list(listed)
    if names is not None:
        listing = BUILD / f"listed-{number}.json"
        listing.write_text(json.dumps(names))
        command = [*command, f"--listed={listing}", *sorted({name.partition("::")[0] for name in names})]
    own = ["-p", "tests.runner.plugin", "--continue-on-collection-errors", f"--results={results}"]
    with tempfile.TemporaryDirectory(prefix="t-", ignore_cleanup_errors=True) as temporary:
        environment = variables(os.environ) | more
        if names is not None:
            environment |= {"GALLERY": f"{temporary}/gallery"}
        process = subprocess.Popen([*command, *own], cwd=ROOT, env=environment, start_new_session=True)
        code = _wait(process, until, files)
    outcomes = read_results(file for file in files if file.exists())
    if code == -signal.SIGKILL and until is not None and time.time() > until and outcomes:
        return cut_off(outcomes)
    missing = {name: Outcome(FAILED, error="it did not run") for name in names or () if name not in outcomes}
    if not outcomes or (code not in (0, 1, 5) and not any(each.kind == FAILED for each in outcomes.values())):
        missing["pytest"] = Outcome(FAILED, error=f"exit code {code}")
    return outcomes | missing


def _wait(process: subprocess.Popen[bytes], until: float | None, files: list[Path]) -> int:
    """Wait until it ends, and kill it at the time `until`, or where no test has begun or ended for `_SILENT_S`."""
    news = time.time()
    try:
        while True:
            try:
                return process.wait(_LOOK_S)
            except subprocess.TimeoutExpired:
                news = max([news, *(file.stat().st_mtime for file in files if file.exists())])
                if time.time() > min(news + _SILENT_S, until or math.inf):
                    return -signal.SIGKILL
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextmanager
def busy(loops: int) -> Iterator[None]:
    """Keep `loops` cores busy."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
