"""Facts about the run folder. A child process gathers them, because a dead file server blocks its caller."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from hvdtrain.programs import Answer, answer

_TIMEOUT_S = 15


def storage(folder: Path) -> Answer:
    """Check a folder. It writes a byte into a file without a name.

    The answer has facts about the nearest existing folder: ``folder``, ``type`` of its file system, ``free_bytes``, and
    ``problem`` if it cannot be written.
    """
    return answer([sys.executable, "-m", "hvdtrain.doctor.facts.storage", str(folder)], _TIMEOUT_S)


def probe(wanted: Path, mounts: str) -> dict[str, Any]:
    """Check a folder in this process. ``mounts``: content of /proc/self/mountinfo."""
    folder = wanted.resolve()
    while not folder.is_dir():
        folder = folder.parent
    space = os.statvfs(folder)
    found = {
        "folder": str(folder),
        "type": file_system_type(folder, mounts),
        "free_bytes": space.f_bavail * space.f_frsize,
    }
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(b"x")
            os.fsync(file.fileno())
    except OSError as error:
        found["problem"] = error.strerror or str(error)
    return found


def file_system_type(folder: Path, mounts: str) -> str:
    """Return the file system type of a folder. A later mount on the same folder hides an earlier one."""
    deepest, kind = -1, "unknown"
    for line in mounts.splitlines():
        fields, _, rest = line.partition(" - ")
        place = Path(fields.split()[4].replace(r"\040", " "))
        if folder.is_relative_to(place) and len(place.parts) >= deepest:
            deepest, kind = len(place.parts), rest.split()[0]
    return kind


if __name__ == "__main__":
    sys.stdout.write(json.dumps(probe(Path(sys.argv[1]), Path("/proc/self/mountinfo").read_text())) + "\n")
