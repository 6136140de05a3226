"""`journal.jsonl`: one line a step and a line an event, the machine-readable truth of a run."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from hvdtrain.errors import RunDirectoryError
from hvdtrain.observe.failure.failure_output import to_stderr
from hvdtrain.observe.line_file import LineFile
from hvdtrain.regular import open_regular

_ASIDE = ("warning", "machine", "explained")
"""Events that may come when the run has ended."""
_LIMIT = 50_000
"""Lines: about 20 MB, and an hour of steps of 70 ms."""
_TRY_EVERY_S = 1.0


def _to_stderr(text: str) -> None:
    to_stderr(f"hvdtrain: {text}\n")


class Journal:
    """Appends lines; each is handed to the kernel at once, so that a killed process loses none.

    A disk that is full or read-only, or a quota, does not end the run: lines wait in memory until they can be written,
    in order. It is said once, said again when they are written, and at the end what is missing.

    Args:
        path: made if missing. A last line that a kill cut off is closed, so that it spoils no other.
        say: shows a line, and writes nothing to this journal.
        limit: lines that wait at most; then the oldest are lost, and an event `lines_lost` stands in their place.
        clock: seconds.
    """

    def __init__(
        self,
        path: Path,
        say: Callable[[str], None] = _to_stderr,
        limit: int = _LIMIT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = LineFile(path)
        self._say = say
        self._limit = limit
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: deque[Mapping[str, Any]] = deque()
        self._lost = 0
        self._trouble = ""
        self._rests_until = -math.inf

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a line, now or when there is room. Nobody changes `record` any more. May be called from any thread.

        Numbers keep full precision; those that are not finite stand as null, as JSON has none. What JSON cannot hold,
        such as bytes that are no text in an error's message, stands as text with escapes.
        """
        with self._lock:
            self._waiting.append(record)
            if len(self._waiting) > self._limit:
                self._waiting.popleft()
                self._lost += 1
            if self._clock() >= self._rests_until:
                self._drain()

    def close(self) -> None:
        """Try once more to write what waits, say what is missing, close the file."""
        with self._lock:
            self._drain()
            if self._waiting:
                steps = [record["step"] for record in self._waiting if "event" not in record]
                which = f", of steps {steps[0]} to {steps[-1]}" if steps else ""
                count = len(self._waiting) + self._lost
                self._say(f"warning: {count} lines of the journal are missing{which}: {self._trouble}")
                self._waiting.clear()
            with suppress(OSError):
                self._file.close()

    def _drain(self) -> None:
        try:
            if self._lost and self._waiting:
                self._file.write({"event": "lines_lost", "lines": self._lost})
                self._say(f"warning: {self._lost} lines of the journal are lost: {self._trouble}")
                self._lost = 0
            while self._waiting:
                self._file.write(self._waiting[0])
                self._waiting.popleft()
        except RunDirectoryError as error:
            self._rests_until = self._clock() + _TRY_EVERY_S
            if not self._trouble:
                self._trouble = error.what
                self._say(
                    f"warning: {error.what}: make room. Training goes on; up to {self._limit:,} lines wait in memory"
                    " until they can be written"
                )
        else:
            if self._trouble:
                self._trouble, self._rests_until = "", -math.inf
                self._say("the journal is written again, with the lines that waited")


def journal_lines(path: str | Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a journal, in order, one at a time. A line that a kill cut off is left out."""
    with open_regular(Path(path)) as file:
        for line in file:
            with suppress(ValueError):
                if isinstance(record := orjson.loads(line), dict):
                    yield record


def read_journal(path: str | Path) -> list[dict[str, Any]]:
    """All whole lines of a journal, in order."""
    return list(journal_lines(path))


def read_steps(path: str | Path) -> dict[int, dict[str, Any]]:
    """The steps of a journal by number: of a step that was done again after a resume, the last counts."""
    return {line["step"]: line for line in journal_lines(path) if "event" not in line}


def last_step(path: Path) -> int:
    """The number of the step that was written last, 0 for none. Reads the end of the file only."""
    for line in reversed(_tail(path)):
        with suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and "event" not in record:
                return int(record["step"])
    return 0


def is_finished(path: Path) -> bool:
    """Whether the run came to its end, and nothing was done since. Reads the end of the file only."""
    for line in reversed(_tail(path)):
        try:
            event = json.loads(line).get("event")
        except (ValueError, AttributeError, RecursionError):
            return False
        if event not in _ASIDE:
            return bool(event == "finished")
    return False


def _tail(path: Path) -> list[bytes]:
    """The last lines; the first of them may lack its beginning."""
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - 65536))
        return file.read().splitlines()
