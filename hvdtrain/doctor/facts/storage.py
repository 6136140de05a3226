"""Facts about the run folder. A child process gathers them, because a dead file server blocks its caller."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hvdtrain.programs import Answer, answer

_TIMEOUT_S = 15
_CHUNK = b"\x5a" * (1 << 20)
_CHUNKS = 32
_ENOUGH_S = 1.0


def storage(folder: Path) -> Answer:
    """Check a folder. It writes up to 32 MiB for about a second, into a file without a name.

    The answer has facts about the nearest existing folder: ``folder``, ``type`` of its file system, ``free_bytes``,
    ``mib_per_s`` of synced writing, ``sync_ms`` of a small file, or ``problem``.
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
        return {**found, **_speed(folder)}
    except OSError as error:
        return {**found, "problem": error.strerror or str(error)}


def file_system_type(folder: Path, mounts: str) -> str:
    """Return the file system type of a folder. A later mount on the same folder hides an earlier one."""
    deepest, kind = -1, "unknown"
    for line in mounts.splitlines():
        fields, _, rest = line.partition(" - ")
        place = Path(fields.split()[4].replace(r"\040", " "))
        if folder.is_relative_to(place) and len(place.parts) >= deepest:
            deepest, kind = len(place.parts), rest.split()[0]
    return kind


def _speed(folder: Path) -> dict[str, float]:
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        start = time.perf_counter()
        file.write(b"x")
        os.fsync(file.fileno())
        synced = time.perf_counter()
        written = 0
        while written < _CHUNKS and time.perf_counter() - synced < _ENOUGH_S:
            file.write(_CHUNK)
            os.fsync(file.fileno())
            written += 1
        seconds = time.perf_counter() - synced
    return {"sync_ms": 1e3 * (synced - start), "mib_per_s": written / seconds}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(probe(Path(sys.argv[1]), Path("/proc/self/mountinfo").read_text())) + "\n")
