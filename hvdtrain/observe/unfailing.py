"""Output streams that raise no errors: unwritable text is lost, text that cannot be encoded is escaped."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any, TextIO, cast


class Unfailing:
    """Wraps a text stream so that `write` and `flush` raise no errors.

    The disk may be full, a pipe closed, or the terminal's encoding may lack characters.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        with suppress(Exception):  # the user's own stream may lack it
            stream.reconfigure(errors="backslashreplace")  # type: ignore[attr-defined]

    def write(self, text: str) -> int:
        """Write the text if possible."""
        with suppress(OSError, ValueError):  # a closed file or an encoding raises the latter
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush if possible."""
        with suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the stream."""
        return getattr(self._stream, name)


def unfailing(stream: TextIO) -> TextIO:
    """Return `stream` in a wrapper that raises no errors."""
    return cast("TextIO", stream if isinstance(stream, Unfailing) else Unfailing(stream))


def make_output_unfailing() -> None:
    """Make errors of this process's standard output and error harmless.

    Closed ones are opened on /dev/null. Otherwise the next opened file would get their numbers, and with them the
    output of libraries.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(1 if name == "stdout" else 2, "w", encoding="utf-8", closefd=False))
        setattr(sys, name, unfailing(getattr(sys, name)))
