"""The folder of checkpoints: temporary folders in it, and whether all ranks see the same files."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import time
from contextlib import suppress
from pathlib import Path

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import allgather_json, on_rank_0

_NAME = re.compile(r"\.writing-step-\d+-[0-9a-f]+-(\d+)-(.+)")
_SILENT_S = 900.0
"""A temporary folder of another host without changes for this long is abandoned."""


def temporary_name(step: int) -> str:
    """Return a new name for a temporary folder, with the step, this process and this host."""
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


def is_folder_shared(comm: Comm, folder: Path | None) -> bool:
    """Return whether there are other ranks, and all see the files that rank 0 writes to `folder`. Collective: yes.

    `folder` exists on rank 0, and is ignored elsewhere.
    """
    if comm.size == 1:
        return False
    made: list[Path] = []

    def make_probe() -> str:
        assert folder is not None
        path = folder.resolve() / f".shared-{secrets.token_hex(8)}"
        with suppress(OSError):  # a full disk: each save reports it
            path.touch()
            made.append(path)
            return str(path)
        return ""

    try:
        probe = on_rank_0(comm, make_probe, name="shared/file")
        return all(allgather_json(comm, bool(probe) and Path(probe).exists(), name="shared/seen"))
    finally:
        for path in made:  # also if a rank is lost meanwhile
            with suppress(OSError):
                path.unlink()
