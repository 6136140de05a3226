"""Output that never ends a run: what cannot be written is lost, and what cannot be encoded is escaped."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any, TextIO, cast


class Unfailing:
    """A text stream whose `write` and `flush` raise nothing; all else is the stream's own.

    The disk may be full, the other end of a pipe gone, the terminal's encoding too small.

    Args:
        stream: any text stream.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        with suppress(Exception):  # a stream of the user's own may lack it
            stream.reconfigure(errors="backslashreplace")  # type: ignore[attr-defined]

    def write(self, text: str) -> int:
        """Write what can be written."""
        with suppress(OSError, ValueError):  # of a closed file, and of an encoding
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush what can be flushed."""
        with suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        """Return what the stream has."""
        return getattr(self._stream, name)


def unfailing(stream: TextIO) -> TextIO:
    """Return `stream` as one that never fails."""
    return cast("TextIO", stream if isinstance(stream, Unfailing) else Unfailing(stream))


def make_output_unfailing() -> None:
    """Make standard output and error of this process unfailing, until its end.

    Where they are closed, they lead nowhere from now on: a file that is opened would take their numbers, and get what a
    library writes there.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(1 if name == "stdout" else 2, "w", encoding="utf-8", closefd=False))
        setattr(sys, name, unfailing(getattr(sys, name)))
