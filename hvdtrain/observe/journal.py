"""`journal.jsonl`: one line a step and a line an event, the machine-readable truth of a run."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from hvdtrain.errors import RunDirectoryError
from hvdtrain.observe.encodable import plain

NAME = "journal.jsonl"

_ASIDE = ("warning", "machine", "explained")
"""Events that may come when the run has ended."""


class Journal:
    """Appends lines; each is handed to the kernel at once, so that a killed process loses none.

    Args:
        path: made if missing. A last line that a kill cut off is closed, so that it spoils no other.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        if self._file.tell() and _last_byte(path) != b"\n":
            self._file.write(b"\n")

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a line. Numbers keep full precision; those that are not finite stand as null, as JSON has none.

        What JSON cannot hold, such as bytes that are no text in an error's message, stands as text with escapes.

        Errors:
            RunDirectoryError: the disk is full or went away.
        """
        try:
            line = orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
        except TypeError:
            line = orjson.dumps(plain(record), option=orjson.OPT_APPEND_NEWLINE)
        try:
            written = self._file.write(line)
            if written < len(line):  # the disk is full; a part of a line would spoil the next one
                self._file.truncate(self._file.seek(0, os.SEEK_END) - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise RunDirectoryError(
                f"{self._file.name} cannot be written: {error.strerror}",
                next_step="make room; the same command goes on from the last checkpoint",
            ) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def journal_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a journal, in order, one at a time. A line that a kill cut off is left out."""
    with path.open("rb") as file:
        for line in file:
            try:
                yield orjson.loads(line)
            except ValueError:
                continue


def read_journal(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a journal, in order."""
    return list(journal_lines(path))


def read_steps(path: Path) -> dict[int, dict[str, Any]]:
    """The steps of a journal by number: of a step that was done again after a resume, the last counts."""
    return {line["step"]: line for line in journal_lines(path) if "event" not in line}


def is_finished(path: Path) -> bool:
    """Whether the run came to its end, and nothing was done since. Reads the end of the file only."""
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - 65536))
        lines = file.read().splitlines()
    for line in reversed(lines):
        try:
            event = json.loads(line).get("event")
        except ValueError:
            return False
        if event not in _ASIDE:
            return bool(event == "finished")
    return False


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1)
