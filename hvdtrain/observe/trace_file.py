"""A Chrome trace file that is always valid JSON, even after a kill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

_END = b"\n]\n"


class TraceFile:
    """A growing JSON array of trace events.

    A single write replaces the closing bracket by new events and a bracket, so the array is always closed. The format
    is the JSON array form of Google's "Trace Event Format", as in Horovod's Timeline. Perfetto and chrome://tracing
    read it.

    Args:
        path: must not exist; its folder is created.
        first: the first events, at least one.

    Errors:
        OSError: it exists, or cannot be written.
    """

    def __init__(self, path: Path, first: Sequence[Mapping[str, Any]]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("xb", buffering=0)
        self._write(b"[\n" + _lines(first) + _END)

    def append(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Add events. Errors: OSError: the disk is full or lost."""
        if not events:
            return
        end = self._file.seek(-len(_END), 2)
        try:
            self._write(b",\n" + _lines(events) + _END)
        except OSError:  # a full disk may have written a part
            self._file.truncate(end)
            self._file.seek(end)
            self._write(_END)
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, content: bytes) -> None:
        rest = memoryview(content)
        while rest:  # on a full disk, a write is short and only the next one fails
            rest = rest[self._file.write(rest) :]


def free_path(path: Path) -> Path:
    """Return `path` if it does not exist, else the first free one of ``NAME-1.json``, ``NAME-2.json``, ..."""
    found, number = path, 0
    while found.exists():
        number += 1
        found = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return found


def _lines(events: Sequence[Mapping[str, Any]]) -> bytes:
    return b",\n".join(orjson.dumps(event) for event in events)
