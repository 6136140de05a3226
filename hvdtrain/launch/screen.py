"""Show the output of a job from a separate thread, so that a stopped terminal or a full pipe does not block the job."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

MOST_CHARACTERS = 1 << 24
"""Most characters that wait to be shown. Further lines are dropped and counted."""


class Screen:
    """Shows lines from any thread, in order of arrival.

    Args:
        say: called with a line of the driver's own.
        show: called with a rank's line, and whether it was on stderr.
    """

    def __init__(self, say: Callable[[str], None], show: Callable[[str, bool], None]) -> None:
        self._say, self._show = say, show
        self._lines: queue.SimpleQueue[tuple[str, bool | None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting = 0
        self._left_out = 0
        self._thread = threading.Thread(target=self._run, name="screen", daemon=True)
        self._thread.start()

    def say(self, text: str) -> None:
        """Queue a line of the driver's own."""
        self._put(text, None)

    def show(self, text: str, err: bool) -> None:
        """Queue a rank's line. `err`: for stderr."""
        self._put(text, err)

    def close(self) -> None:
        """Wait until all lines are shown."""
        self._lines.put(None)
        self._thread.join()

    def _put(self, text: str, err: bool | None) -> None:
        with self._lock:
            if self._waiting > MOST_CHARACTERS:
                self._left_out += 1
                return
            self._waiting += len(text) + 1
            self._lines.put((text, err))

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            text, err = line
            if err is None:
                self._say(text)
            else:
                self._show(text, err)
            self._count(len(text) + 1)
        self._count(0)

    def _count(self, shown: int) -> None:
        """Subtract what was shown. Report dropped lines once half of the space is free again."""
        with self._lock:
            self._waiting -= shown
            left_out = self._left_out
            if not left_out or (self._waiting > MOST_CHARACTERS // 2 and shown):
                return
            self._left_out = 0
        self._say(f"{left_out} lines were dropped around here: they arrived faster than they could be shown")
