"""Run Python code in a child process, because the call could abort in C, or never return."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.programs import run_program

LOADED = """
def loaded(*beginnings):
    with open("/proc/self/maps") as lines:
        files = [line.split(None, 5)[5].strip() for line in lines if line.count("/")]
    return next((file for file in files if file.rpartition("/")[2].startswith(beginnings)), None)
"""
"""Code of a function that returns the first loaded file with a given beginning of its name."""


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
