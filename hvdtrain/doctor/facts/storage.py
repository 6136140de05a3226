"""Facts about the run folder. A child process gathers them, because a dead file server blocks its caller."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from hvdtrain.programs import Answer, answer

_TIMEOUT_S = 15


def storage(folder: Path) -> Answer:
    """Check a folder. It writes a byte into a file without a name.

    The answer has facts about the nearest existing folder: ``folder``, ``type`` of its file system, ``free_bytes``, and
    ``problem`` if it cannot be written.
    """
    return answer([sys.executable, "-m", "hvdtrain.doctor.facts.storage", str(folder)], _TIMEOUT_S)


def probe(wanted: Path) -> dict[str, Any]:
    """Check a folder in this process."""
    folder = wanted.resolve()
    while not folder.is_dir():
        folder = folder.parent
    space = shutil.disk_usage(folder)
    found = {"folder": str(folder), "type": file_system_type(folder), "free_bytes": space.free}
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(b"x")
            os.fsync(file.fileno())
    except OSError as error:
        found["problem"] = error.strerror or str(error)
    return found


def file_system_type(folder: Path) -> str:
    """Return the file system type of a folder. A later mount on the same folder hides an earlier one."""
    around = [mount for mount in psutil.disk_partitions(all=True) if folder.is_relative_to(mount.mountpoint)]
    deepest_last = sorted(around, key=lambda mount: len(mount.mountpoint))
    return str(deepest_last[-1].fstype) if deepest_last else "unknown"


if __name__ == "__main__":
    sys.stdout.write(json.dumps(probe(Path(sys.argv[1]))) + "\n")
