"""A file of JSON lines. Each line is appended whole, or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from hvdtrain.errors import RunDirectoryError
from hvdtrain.observe.encodable import plain


class LineFile:
    """Appends lines by one system call each, so that a killed process loses none.

    Args:
        path: created if missing. A last line that a kill cut off gets a newline.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("ab", buffering=0)
        if self._file.tell() and _last_byte(path) != b"\n":
            self._file.write(b"\n")

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a line. Numbers keep full precision; numbers that are not finite become null.

        Values that JSON cannot hold, such as bytes in an error's message, become escaped text.

        Errors:
            RunDirectoryError: the disk is full or lost.
        """
        try:
            line = orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
        except TypeError:
            line = orjson.dumps(plain(record), option=orjson.OPT_APPEND_NEWLINE)
        try:
            written = self._file.write(line)
            if written < len(line):  # the disk is full; remove the part, which would damage the next line
                self._file.truncate(self._file.seek(0, os.SEEK_END) - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise RunDirectoryError(
                f"{self._file.name} cannot be written: {error.strerror}",
                next_step="free disk space; the same command resumes from the last checkpoint",
            ) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1)
