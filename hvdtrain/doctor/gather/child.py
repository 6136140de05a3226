"""Python code that runs in a process of its own, because what it asks could abort in C."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Answer:
    """What a child process printed as JSON, or why it didn't."""

    values: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


def ask(code: str, timeout_s: float = 60) -> Answer:
    """Run Python code in a child process and read the JSON of its last line."""
    argv = [sys.executable, "-c", code]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return Answer(error=str(error))
    if done.returncode < 0:
        return Answer(error=f"the process was ended by signal {-done.returncode}")
    try:
        return Answer(values=dict(json.loads(done.stdout.splitlines()[-1])))
    except (ValueError, IndexError, TypeError):
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return Answer(error=lines[-1].strip() if lines else f"exit status {done.returncode}")
