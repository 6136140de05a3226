"""A log of a job's events, in order: one line of JSON each."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any


class EventLog:
    """Appends events to a file; does nothing without one.

    Each line has ``mono_s`` (this machine's monotonic clock), ``wall_s`` (since the epoch) and ``event``.

    Errors:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else path.open("a", encoding="utf-8")

    def write(self, name: str, facts: dict[str, Any]) -> None:
        """Append an event. A full disk ends the log, not the job."""
        if self._file is None:
            return
        line = {"mono_s": round(time.monotonic(), 6), "wall_s": round(time.time(), 6), "event": name, **facts}
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError:
            self._file = None

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
