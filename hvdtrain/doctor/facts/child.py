"""Python code that runs in a process of its own, because what it asks could abort in C, or never return."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

LOADED = """
def loaded(*beginnings):
    with open("/proc/self/maps") as lines:
        files = [line.split(None, 5)[5].strip() for line in lines if line.count("/")]
    return next((file for file in files if file.rpartition("/")[2].startswith(beginnings)), None)
"""
"""Code that says which file of such a name this process has loaded."""

_AFTER_KILL_S = 1


@dataclass(frozen=True)
class Answer:
    """What a child process printed as JSON, or why it didn't."""

    values: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


def ask(code: str, timeout_s: float = 60) -> Answer:
    """Run Python code in a child process and read the JSON of its last line."""
    return answer([sys.executable, "-c", code], timeout_s)


def answer(argv: Sequence[str], timeout_s: float) -> Answer:
    """Run a program and read the JSON of its last line.

    One that does not end is killed, and not waited for without end: it may hang in the kernel, on a file server that
    is gone.
    """
    try:
        child = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    except OSError as error:
        return Answer(error=str(error))
    try:
        out, err = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        child.kill()
        with suppress(subprocess.TimeoutExpired):
            child.wait(_AFTER_KILL_S)
        for pipe in (child.stdout, child.stderr):
            if pipe:
                pipe.close()
        return Answer(error=f"no answer in {timeout_s:g} s")
    if child.returncode < 0:
        return Answer(error=f"the process was ended by signal {-child.returncode}")
    try:
        return Answer(values=dict(json.loads(out.splitlines()[-1])))
    except (ValueError, IndexError, TypeError):
        lines = [line for line in err.splitlines() if line.strip()]
        return Answer(error=lines[-1].strip() if lines else f"exit status {child.returncode}")
