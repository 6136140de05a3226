"""Run another program, wait for it or read its answer; read the facts about a process from /proc/PID/stat. A leaf."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

_AFTER_KILL_S = 1.0
"""How long to wait for a killed process: one that hangs in the kernel, on a dead file server for example, stays."""


class Finished(NamedTuple):
    """Exit code, -N where signal N ended the program, and what it wrote."""

    code: int
    out: str
    err: str


def run_program(
    argv: Sequence[str],
    timeout_s: float | None,
    env: Mapping[str, str] | None = None,
    *,
    folder: Path | str | None = None,
    end_s: float = 0,
) -> Finished:
    """Run a program without stdin, in a session of its own, and capture its output as text.

    On a timeout or an exception, such as KeyboardInterrupt, the program's process group is killed. mpirun starts groups
    of its own; to end them it gets `end_s` seconds after SIGTERM, before it is killed. The default of `env`, the whole
    environment, and of `folder` are those of this process.

    Errors: OSError if it cannot be started; TimeoutError, a subclass, where it does not end in time.
    """
    process = subprocess.Popen(
        argv, env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, encoding="utf-8", errors="replace", start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=timeout_s)
    except BaseException as error:
        if end_s:
            process.terminate()
            end = time.monotonic() + end_s
            while process.poll() is None and time.monotonic() < end:  # what it started may keep the pipes open
                with suppress(subprocess.TimeoutExpired):
                    process.communicate(timeout=0.1)
        _kill_group(process)
        for pipe in (process.stdout, process.stderr):
            if pipe:
                pipe.close()
        if isinstance(error, subprocess.TimeoutExpired):
            raise TimeoutError(f"{argv[0]} did not end within {timeout_s:g} s") from None
        raise
    return Finished(process.returncode, out, err)


def end_group(process: subprocess.Popen[Any], patience_s: float) -> None:
    """End the process group of a process that leads it: SIGTERM, and SIGKILL for those that stay."""
    end = time.monotonic() + patience_s
    try:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
            while time.monotonic() < end:
                process.poll()  # reaps a zombie, which would count
                os.killpg(process.pid, 0)
                time.sleep(0.05)
    finally:  # also on another signal
        _kill_group(process, patience_s)


def output(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return what a program writes to stdout and stderr; "" where it cannot be run or takes more than a minute."""
    try:
        done = run_program(argv, 60, environ)
    except OSError:
        return ""
    return done.out + done.err


@dataclass(frozen=True)
class Answer:
    """What a child process printed as JSON, or why it didn't."""

    values: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


def ask(code: str, timeout_s: float = 60) -> Answer:
    """Run Python code in a child process and read the JSON of its last line."""
    return answer([sys.executable, "-c", code], timeout_s)


def answer(argv: Sequence[str], timeout_s: float) -> Answer:
    """Run a program and read the JSON of its last line."""
    try:
        done = run_program(argv, timeout_s)
    except TimeoutError:
        return Answer(error=f"no answer in {timeout_s:g} s")
    except OSError as error:
        return Answer(error=str(error))
    if done.code < 0:
        return Answer(error=f"the process was ended by signal {-done.code}")
    try:
        return Answer(values=dict(json.loads(done.out.splitlines()[-1])))
    except (ValueError, IndexError, TypeError):
        lines = [line for line in done.err.splitlines() if line.strip()]
        return Answer(error=lines[-1].strip() if lines else f"exit status {done.code}")


def _kill_group(process: subprocess.Popen[Any], wait_s: float = _AFTER_KILL_S) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(wait_s)


class ProcessStat(NamedTuple):
    """Facts about one process.

    psutil reports the start as a time of the wall clock, so two readers differ when somebody sets the clock between
    them. The kernel's count since boot identifies a process together with its number.
    """

    state: str  # the kernel's letter: T is stopped, Z a zombie, X dead
    session: int  # number of the process that leads its session
    cpu_s: float  # seconds of CPU time, its own and that of children it has waited for
    start_ticks: int  # its start, in clock ticks since boot


def read_stat(pid: int, root: Path = Path("/proc")) -> ProcessStat:
    """Read the facts about a process.

    Errors: FileNotFoundError or ProcessLookupError if there is none; OSError, as without a free file descriptor.
    """
    text = (root / str(pid) / "stat").read_text(errors="replace")
    fields = text.rpartition(")")[2].split()  # the field before, the program's name, may hold blanks and brackets
    if not fields:
        raise OSError(f"{root}/{pid}/stat is empty")
    ticks = sum(map(int, fields[11:15]))
    return ProcessStat(fields[0], int(fields[3]), ticks / os.sysconf("SC_CLK_TCK"), int(fields[19]))


def wait_with_signals(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process and return its exit code, 128 + N where signal N ended it.

    Signal handlers of Python run within a second meanwhile.

    A plain ``wait()`` can miss a signal: one that arrives just before the system call begins does not interrupt it, and
    Python runs the handler only when the call returns, which is at the end of the process.
    """
    waiter = threading.Thread(target=process.wait, daemon=True)
    waiter.start()
    while waiter.is_alive():
        waiter.join(1.0)
    code = process.wait()
    return code if code >= 0 else 128 - code
