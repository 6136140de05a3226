"""A Chrome trace that is valid JSON at each moment, whatever kills the process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

_END = b"\n]\n"


class TraceFile:
    """A JSON array of trace events that grows.

    What is appended goes over the closing bracket, together with a new one, by a single write: no reader and no kill
    finds the array open. Format: Google's "Trace Event Format", its JSON array form, which Perfetto and
    chrome://tracing read, and Horovod's Timeline is written in.

    Args:
        path: must not exist; its folder is made.
        first: events to begin with, one or more.

    Errors:
        OSError: it exists, or cannot be written.
    """

    def __init__(self, path: Path, first: Sequence[Mapping[str, Any]]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("xb", buffering=0)
        self._write(b"[\n" + _lines(first) + _END)

    def append(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Add events.

        Errors:
            OSError: the disk is full or went away.
        """
        if not events:
            return
        end = self._file.seek(-len(_END), 2)
        try:
            self._write(b",\n" + _lines(events) + _END)
        except OSError:  # with a part of it, that of a full disk
            self._file.truncate(end)
            self._file.seek(end)
            self._write(_END)
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, content: bytes) -> None:
        rest = memoryview(content)
        while rest:  # a write takes less where the disk gets full, and only the next one says so
            rest = rest[self._file.write(rest) :]


def free_path(path: Path) -> Path:
    """`path`, or where that exists the first of ``NAME-1.json``, ``NAME-2.json``, ... that does not."""
    found, number = path, 0
    while found.exists():
        number += 1
        found = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return found


def _lines(events: Sequence[Mapping[str, Any]]) -> bytes:
    return b",\n".join(orjson.dumps(event) for event in events)
