"""Asking the user's script which hosts there are."""

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
    """Run the script, which is executed itself and never read by a shell; the slots of each host it names.

    Args:
        script: the program.
        timeout_s: how long it may take.
        slots: of a host that it names without.

    Errors:
        LaunchError: it cannot be run, takes too long, fails, or names what is no host.
    """
    expected = "a program that writes a line host or host:slots for each host, and exits with 0"
    try:
        code, out, err = run_program([str(script.absolute())], timeout_s)
    except TimeoutError:
        raise LaunchError(f"{script} did not end within {timeout_s:.0f} s.", expected=expected) from None
    except OSError as error:
        hint = _hint(script)
        raise LaunchError(f"{script} cannot be run.", expected=expected, found=str(error), next_step=hint) from None
    if code != 0:
        found = f"exit code {code}: {err.strip()[-500:]}"
        raise LaunchError(f"{script} failed.", expected=expected, found=found)
    return parse_discovered(out, slots)


def _hint(script: Path) -> str:
    """What to do about a script that cannot be run."""
    words = str(script).split()
    if script.is_dir():
        return f"name the program itself; {script} is a folder"
    if not script.exists() and len(words) > 1:
        return "it is run by its path, without arguments: write the command into a script of its own, and name that"
    if not script.exists():
        return f"give the path of a program that is there, from {Path.cwd()} on"
    if not os.access(script, os.X_OK):
        return f"chmod +x {script}"
    return "see that its first line names its interpreter, and that this is there, as in #!/bin/sh"


def watch_script(
    ask: Callable[[], dict[str, int]],
    over: threading.Event,
    found: Callable[[dict[str, int]], None],
    say: Callable[[str], None],
) -> None:
    """Ask again and again until it is over; the last answer stands while there is none.

    Args:
        ask: gives the answer, as `run_script`.
        over: set when nobody wants to know any more.
        found: called with each answer that is another than the one before.
        say: called with each error that is another than the one before.
    """
    last: dict[str, int] = {}
    error = ""
    while not over.wait(_AGAIN_S):
        try:
            hosts = ask()
        except LaunchError as wrong:
            if str(wrong) != error:
                error = str(wrong)
                say(f"{error}\n  the hosts stay as they were")
            continue
        if hosts != last or error:
            last, error = hosts, ""
            found(hosts)
