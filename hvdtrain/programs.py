"""Run another program to its end and capture its output. A leaf."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

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

    Errors:
        OSError: it cannot be started; TimeoutError, a subclass, where it does not end in time.
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
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=end_s)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_AFTER_KILL_S)
        for pipe in (process.stdout, process.stderr):
            if pipe:
                pipe.close()
        if isinstance(error, subprocess.TimeoutExpired):
            raise TimeoutError(f"{argv[0]} did not end within {timeout_s:g} s") from None
        raise
    return Finished(process.returncode, out, err)
