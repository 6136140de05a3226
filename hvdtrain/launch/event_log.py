"""A file with a line of JSON for each thing that happened to a job, in the order in which it did."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any


class EventLog:
    """Appends to a file; without one it does nothing.

    Each line has ``mono_s`` (of this machine's monotonic clock), ``wall_s`` (since the epoch) and ``event``.

    Errors:
        OSError: it cannot be opened.
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
        """Nothing comes any more."""
        if self._file is not None:
            self._file.close()
