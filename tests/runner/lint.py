"""Checks of the source that run no test: all of them, or those of a minute before a commit."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from tests.runner.sessions import ROOT, variables

_QUICK = (["ruff", "check", "."], ["ruff", "format", "--check", "."], ["tests.lint.wording"])
_MYPY = ["mypy"]
_COLLECTION = ["pytest", "-q", "-p", "no:cacheprovider", "--collect-only", "-qq"]
_STRUCTURE = ["pytest", "-q", "-p", "no:cacheprovider", "tests/test_structure.py"]


def lint() -> str:
    """Return what ruff, mypy and the check of wording find."""
    return _findings([*_QUICK, _MYPY])


def check() -> str:
    """Return what can be found in a minute: lint, test files that cannot be collected, a broken structure."""
    typing = beside(lambda: _findings([_MYPY]))
    found = _findings([*_QUICK, _COLLECTION, _STRUCTURE])
    return "\n".join(filter(None, [found, typing()]))


def _findings(commands: list[list[str]]) -> str:
    found = []
    for words in commands:
        began_s = time.monotonic()
        argv = [sys.executable, "-m", *words]
        done = subprocess.run(argv, cwd=ROOT, env=variables(os.environ), capture_output=True, text=True)
        print(f"{' '.join(words)}: {time.monotonic() - began_s:.0f} s", flush=True)
        if done.returncode:
            found.append(f"{' '.join(words)}:\n{done.stdout}{done.stderr}")
    return "\n".join(found)


def beside(work: Callable[[], str]) -> Callable[[], str]:
    """Start work in a thread; return what waits for its result."""
    results: list[str] = []

    def body() -> None:
        try:
            results.append(work())
        except Exception as error:  # a check that could not run has not passed
            results.append(f"a check could not run: {error}")

    thread = threading.Thread(target=body)
    thread.start()

    def wait() -> str:
        thread.join()
        return results[0]

    return wait
