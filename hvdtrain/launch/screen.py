"""What a job shows: by a thread of its own, so that a terminal that is stopped, or a full pipe, stops no job."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

MOST_CHARACTERS = 1 << 24
"""That wait to be shown. What comes then is left out, and it is said how much."""


class Screen:
    """Lines in the order in which they came, from any thread.

    Args:
        say: called with a line of the driver's own.
        show: called with a line that a rank wrote, and whether that was to stderr.
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
        """Show a line of the driver's own, without waiting."""
        self._put(text, None)

    def show(self, text: str, err: bool) -> None:
        """Show a line that a rank wrote, without waiting. `err`: to stderr."""
        self._put(text, err)

    def close(self) -> None:
        """Wait until all is shown."""
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
        """Take off what was shown; where lines were left out behind it, say so once half of the room is free again."""
        with self._lock:
            self._waiting -= shown
            left_out = self._left_out
            if not left_out or (self._waiting > MOST_CHARACTERS // 2 and shown):
                return
            self._left_out = 0
        self._say(f"{left_out} lines were left out about here: they came faster than they could be shown")
