"""The output of a job: lines for the user, and a log of its events."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MOST_CHARACTERS = 1 << 24
"""Most characters that wait to be shown. Further lines are dropped and counted."""

SAID = "hvdtrain launch: "
"""The beginning of the driver's own lines."""


class Screen:
    """Shows lines in order of arrival from a separate thread: a stopped terminal or a full pipe does not block the job.

    `show` is called with a line, and whether it is for stderr.
    """

    def __init__(self, show: Callable[[str, bool], None]) -> None:
        self._show = show
        self._lines: queue.SimpleQueue[tuple[str, bool] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting = 0
        self._left_out = 0
        self._thread = threading.Thread(target=self._run, name="screen", daemon=True)
        self._thread.start()

    def say(self, text: str) -> None:
        """Queue a line of the driver's own."""
        self.show(SAID + text, True)

    def show(self, text: str, err: bool) -> None:
        """Queue a line. `err`: for stderr."""
        with self._lock:
            if self._waiting > MOST_CHARACTERS:
                self._left_out += 1
                return
            self._waiting += len(text) + 1
            self._lines.put((text, err))

    def close(self) -> None:
        """Wait until all lines are shown."""
        self._lines.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            self._show(*line)
            self._count(len(line[0]) + 1)
        self._count(0)

    def _count(self, shown: int) -> None:
        """Subtract what was shown. Report dropped lines once half of the space is free again."""
        with self._lock:
            self._waiting -= shown
            left_out = self._left_out
            if not left_out or (self._waiting > MOST_CHARACTERS // 2 and shown):
                return
            self._left_out = 0
        what = f"{left_out} lines were dropped around here: they arrived faster than they could be shown"
        self._show(SAID + what, True)


class EventLog:
    """Appends events to a file; does nothing without one.

    Each line has ``mono_s`` (this machine's monotonic clock), ``wall_s`` (since the epoch) and ``event``. Errors:
    OSError if the file cannot be opened.
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
