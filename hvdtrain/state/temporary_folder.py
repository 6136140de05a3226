"""The temporary folder of a checkpoint: its name, its removal, and whether a process still writes to it."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import time
from contextlib import suppress
from pathlib import Path

_NAME = re.compile(r"\.writing-step-\d+-[0-9a-f]+-(\d+)-(.+)")
_SILENT_S = 900.0
"""A temporary folder of another host without changes for this long is abandoned."""


def new_name(step: int) -> str:
    """Return a new name with the step, this process and this host."""
    return f".writing-step-{step:06d}-{secrets.token_hex(4)}-{os.getpid()}-{socket.gethostname()}"


def discard(folder: Path) -> None:
    """Remove a temporary folder. It is renamed first, so that other ranks create no more files in it."""
    renamed = folder.with_name(f".removing-{folder.name}")
    with suppress(OSError):
        folder.rename(renamed)
    for path in (renamed, folder):
        shutil.rmtree(path, ignore_errors=True)


def is_being_written(folder: Path) -> bool:
    """Return whether a running process, including this one, writes to a temporary folder."""
    match = _NAME.fullmatch(folder.name)
    if match is None:
        return False
    if match[2] == socket.gethostname():
        return Path(f"/proc/{match[1]}").exists()
    with suppress(OSError):
        return time.time() - max(path.stat().st_mtime for path in (folder, *folder.iterdir())) < _SILENT_S
    return False
