"""Files of JSON lines; `journal.jsonl` has one line per step and one per event, for programs."""

from __future__ import annotations

import errno
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

import orjson

from hvdtrain.errors import RunDirectoryError
from hvdtrain.observe.output import plain

FORMAT = 1
"""Of the lines that follow an event `started`, which has it. Readers ignore keys and events that they do not know; this
number changes if a known key gets another meaning."""

_LIMIT = 50_000
"""Lines in memory at most: about 20 MB, an hour of steps of 70 ms."""
_RETRY_S = 1.0


def append_whole(file: FileIO, content: bytes) -> None:
    """Append by one system call. On a full disk, remove the written part, which would damage what follows.

    Errors: OSError: the disk is full or lost.
    """
    written = file.write(content)
    if written < len(content):
        file.truncate(file.seek(-written, os.SEEK_END))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class LineFile:
    """Appends lines by one system call each, so that a killed process loses none.

    The file is created if missing. A last line that a kill cut off gets a newline.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("a+b", buffering=0)
        if self._file.tell():
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a line. Numbers keep full precision; numbers that are not finite become null.

        Values that JSON cannot hold, such as bytes in an error's message, become escaped text.

        Errors: RunDirectoryError: the disk is full or lost.
        """
        try:
            line = orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
        except TypeError:
            line = orjson.dumps(plain(record), option=orjson.OPT_APPEND_NEWLINE)
        try:
            append_whole(self._file, line)
        except OSError as error:
            next_step = "free disk space; the same command resumes from the last checkpoint"
            raise RunDirectoryError(f"{self.path} cannot be written: {error.strerror}", next_step=next_step) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@dataclass
class Journal:
    """A `LineFile` that survives a full disk.

    A full or read-only disk does not end the run. Lines wait in memory and are written in order later. One message
    says so, another one when they are written, and one at the end how many are missing.
    """

    path: Path
    say: Callable[[str], None]  # shows a line, and does not write to this journal
    limit: int = _LIMIT  # waiting lines at most. Beyond it the oldest are lost, and an event `lines_lost` replaces them
    clock: Callable[[], float] = time.monotonic
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _waiting: deque[Mapping[str, Any]] = field(default_factory=deque)
    _lost: int = 0
    _error: str = ""
    _retry_at_s: float = -math.inf

    def __post_init__(self) -> None:
        self._file = LineFile(self.path)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a line, now or when there is room. Any thread may call it. `record` must not change later."""
        with self._lock:
            self._waiting.append(record)
            if len(self._waiting) > self.limit:
                self._waiting.popleft()
                self._lost += 1
            if self.clock() >= self._retry_at_s:
                self._drain()

    def close(self) -> None:
        """Try once more to write waiting lines, report missing ones, and close the file."""
        with self._lock:
            self._drain()
            if self._waiting:
                steps = [record["step"] for record in self._waiting if "event" not in record]
                which = f", of steps {steps[0]} to {steps[-1]}" if steps else ""
                count = len(self._waiting) + self._lost
                self.say(f"warning: {count} lines of the journal are missing{which}: {self._error}")
                self._waiting.clear()
            with suppress(OSError):
                self._file.close()

    def _drain(self) -> None:
        try:
            if self._lost and self._waiting:
                self._file.write({"event": "lines_lost", "lines": self._lost})
                self.say(f"warning: {self._lost} lines of the journal are lost: {self._error}")
                self._lost = 0
            while self._waiting:
                self._file.write(self._waiting[0])
                self._waiting.popleft()
        except RunDirectoryError as error:
            self._retry_at_s = self.clock() + _RETRY_S
            if not self._error:
                self._error = error.what
                waiting = f"Training continues; up to {self.limit:,} lines wait in memory"
                self.say(f"warning: {error.what}: make room. {waiting}")
        else:
            if self._error:
                self._error, self._retry_at_s = "", -math.inf
                self.say("the journal is written again, with the lines that waited in memory")
