"""Run the user's discovery script, which lists the hosts."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from hvdtrain.errors import LaunchError
from hvdtrain.launch.hosts import parse_discovered
from hvdtrain.programs import run_program

TIMEOUT_S = 30.0
_AGAIN_S = 1.0


def run_script(script: Path, timeout_s: float = TIMEOUT_S, *, slots: int = 1) -> dict[str, int]:
    """Run the script directly, without a shell; return the slots of each host: `slots` where it prints no number.

    Errors:
        LaunchError: it cannot be run, takes too long, fails, or prints an invalid host.
    """
    expected = "a program that prints a line host or host:slots per host and exits with 0"
    try:
        code, out, err = run_program([str(script.absolute())], timeout_s)
    except TimeoutError:
        what = f"the discovery script {script} did not end within {timeout_s:.0f} s"
        raise LaunchError(what, expected=expected) from None
    except OSError as error:
        what = f"the discovery script {script} cannot be run"
        raise LaunchError(what, expected=expected, found=str(error), next_step=_hint(script)) from None
    if code != 0:
        found = f"exit code {code}: {err.strip()[-500:]}"
        raise LaunchError(f"the discovery script {script} failed", expected=expected, found=found)
    return parse_discovered(out, slots)


def _hint(script: Path) -> str:
    """Return the next step for a script that cannot be run."""
    words = str(script).split()
    if script.is_dir():
        return f"name the program itself; {script} is a folder"
    if not script.exists() and len(words) > 1:
        return "it runs without arguments: write the command into a script and give the path of that"
    if not script.exists():
        return f"give the path of an existing program, relative to {Path.cwd()}"
    if not os.access(script, os.X_OK):
        return f"chmod +x {script}"
    return "check that its first line names an existing interpreter, as in #!/bin/sh"


def watch_script(
    ask: Callable[[], dict[str, int]],
    over: threading.Event,
    found: Callable[[dict[str, int]], None],
    say: Callable[[str], None],
) -> None:
    """Ask for the hosts repeatedly until it is over; the last answer stays valid while the script fails.

    `found` is called with each new answer, `say` with each new error.
    """
    last: dict[str, int] = {}
    error = ""
    while not over.wait(_AGAIN_S):
        try:
            hosts = ask()
        except LaunchError as wrong:
            if str(wrong) != error:
                error = str(wrong)
                say(f"{error}\n  the hosts stay the same")
            continue
        if hosts != last or error:
            last, error = hosts, ""
            found(hosts)
