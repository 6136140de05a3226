"""Run one command of an installation, with its output in a log, and explain its failure."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from hvdtrain.errors import BuildError

Say = Callable[[str], None]

_PERCENT = re.compile(r"^\s*\[\s*(\d+)%\]")
_MEANINGFUL = re.compile(
    r"\w*error:|cmake error|fatal|no space left|disk quota|undefined (reference|symbol)|killed", re.I
)
_NOISE = re.compile(r"subprocess-exited-with-error|Failed building wheel|Failed to build|execute `setup.py`| as error:")
OFFLINE = "the package registry cannot be reached: check the network, the proxy and pip's index-url"


@dataclass(frozen=True)
class Step:
    """One command. ``doing`` and ``about`` (its usual duration) are printed. It is stopped after ``limit_s``."""

    name: str
    doing: str
    about: str
    argv: tuple[str, ...]
    limit_s: float = 3600


def run(step: Step, environ: Mapping[str, str], folder: Path, log: TextIO, progress: Say) -> str:
    """Run a step with this whole environment in this folder, and return its output, which also goes to the log.

    `progress` prints a text whenever the command prints a percentage. Errors: BuildError if the exit code is not 0.
    """
    lines: list[str] = []
    log.write(f"$ {shlex.join(step.argv)}\n")
    process = subprocess.Popen(
        step.argv, env=dict(environ), cwd=folder, text=True, errors="replace",
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    limit = threading.Timer(step.limit_s, process.terminate)
    limit.start()
    try:
        assert process.stdout is not None
        with process.stdout as output:
            for line in output:
                log.write(line)
                lines.append(line.rstrip())
                percent = _PERCENT.match(line)
                if percent:
                    progress(f"{step.doing}: {percent[1]}%")
        code = process.wait()
    finally:
        limit.cancel()
        process.kill()
        log.flush()
    if code != 0:
        raise explain_failure(step, code, lines, log.name)
    return "\n".join(lines)


@contextmanager
def timed(step: Step, say: Say, number: str = "") -> Iterator[None]:
    """Print what a step does before it, and its duration after it."""
    started = time.monotonic()
    say(f"{number}{step.doing} (about {step.about})")
    yield
    say(f"{' ' * len(number)}  done in {time.monotonic() - started:.0f} s")


def explain_failure(step: Step, code: int, lines: Sequence[str], log: str) -> BuildError:
    """Explain a failed command by the most meaningful lines of its output."""
    meaningful = [line for line in lines if _MEANINGFUL.search(line) and not _NOISE.search(line)]
    shown = list(dict.fromkeys(line.strip() for line in meaningful or lines[-8:]))
    if len(shown) > 8:
        shown = [*shown[:5], "...", *shown[-3:]]  # the first errors are the most useful
    fixes = json.loads(Path(__file__).with_name("fixes.json").read_text("utf-8"))
    known = [(line.strip(), each["fix"]) for each in fixes for line in lines if each["sign"] in line]
    if known and known[0][0] not in shown:
        shown.insert(0, known[0][0])
    return BuildError(
        f"Failed while {step.doing}: {Path(step.argv[0]).name} ended with exit code {code}.",
        found="\n    ".join(line[:200] for line in shown) or "no output",
        next_step=f"{known[0][1]}   (log: {log})" if known else f"read the log: {log}",
    )
