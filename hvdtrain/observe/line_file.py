"""A file of lines of JSON that are appended whole, or not at all."""

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
    """Appends lines; each is handed to the kernel at once, so that a killed process loses none.

    Args:
        path: made if missing. A last line that a kill cut off is closed, so that it spoils no other.

    Attributes:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
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


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1)
