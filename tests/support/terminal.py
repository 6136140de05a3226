"""A shell on a terminal: typed keys pass through the terminal."""

from __future__ import annotations

import os
import pty
import select
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.host import tool
from tests.support.launch import TIMEOUT_S


def typed(shell: Sequence[str], keys: str, environment: Mapping[str, str], cwd: Path) -> str:
    """Start an interactive shell, type into it, end it; what its terminal showed.

    Args:
        shell: its argv.
        keys: what is typed; its last line should end the shell.
        environment: all variables that the shell has.
        cwd: where it starts.
    """
    screen, seat = pty.openpty()
    process = subprocess.Popen(
        [tool("setsid"), "--ctty", "--wait", *shell],
        stdin=seat,
        stdout=seat,
        stderr=seat,
        env=dict(environment),
        cwd=cwd,
    )
    os.close(seat)
    shown = b""
    try:
        os.write(screen, keys.encode())
        while select.select([screen], [], [], TIMEOUT_S)[0]:
            try:
                part = os.read(screen, 1 << 16)
            except OSError:  # of a terminal that nobody has open any more
                break
            if not part:
                break
            shown += part
        assert process.wait(TIMEOUT_S) is not None
    finally:
        process.kill()
        process.wait()
        os.close(screen)
    return shown.decode(errors="replace")
