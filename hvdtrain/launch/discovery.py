"""Asking the user's script which hosts there are."""

from __future__ import annotations

import subprocess
from pathlib import Path

from hvdtrain.errors import LaunchError
from hvdtrain.launch.hosts import parse_answer

TIMEOUT_S = 30.0


def ask(script: Path, timeout_s: float = TIMEOUT_S) -> dict[str, int]:
    """Run the script, which is executed itself and never read by a shell; the slots of each host it names.

    Errors:
        LaunchError: it cannot be run, takes too long, fails, or names what is no host.
    """
    expected = "a program that writes a line host or host:slots for each host, and exits with 0"
    try:
        done = subprocess.run(
            [script.absolute()],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{script} did not end within {timeout_s:.0f} s.", expected=expected) from None
    except OSError as error:
        hint = f"chmod +x {script}, and see that its first line names its interpreter, as in #!/bin/sh"
        raise LaunchError(f"{script} cannot be run.", expected=expected, found=str(error), next_step=hint) from None
    text = done.stdout.decode("utf-8", "replace")
    if done.returncode != 0:
        found = f"exit code {done.returncode}: {done.stderr.decode('utf-8', 'replace').strip()[-500:]}"
        raise LaunchError(f"{script} failed.", expected=expected, found=found)
    return parse_answer(text)
