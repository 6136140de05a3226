"""Output that raises no errors: text that can always be encoded, streams that lose what they cannot write."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TextIO, cast

_LARGEST = 1 << 63


def encodable(text: str) -> str:
    """Return the text with lone surrogates, which UTF-8 cannot encode, as escapes."""
    return text.encode("utf-8", errors="backslashreplace").decode("utf-8")


def plain(value: Any) -> Any:
    """Return the value in types of JSON. A value of any other type becomes its ``repr``."""
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, int):
        return int(value) if -_LARGEST <= value < _LARGEST else str(value)
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, Mapping):
        return {encodable(str(name)): plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    try:
        return encodable(repr(value))
    except Exception:  # the user's own __repr__ may raise
        return f"({type(value).__name__})"


class Unfailing:
    """Wraps a text stream so that `write` and `flush` raise no errors.

    The disk may be full, a pipe closed, or the terminal's encoding may lack characters. Each line, with its end, is one
    write to the system: with PYTHONUNBUFFERED Python writes the end apart, and mpirun puts its tag between the two.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        with suppress(Exception):  # the user's own stream may lack it
            stream.reconfigure(errors="backslashreplace")  # type: ignore[attr-defined]
            if stream.write_through:  # type: ignore[attr-defined]
                stream.reconfigure(write_through=False, line_buffering=True)  # type: ignore[attr-defined]

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


def to_stderr(text: str) -> None:
    """Write a text by one system call: a stuck thread may hold the locks of Python's own buffers."""
    with suppress(OSError):
        os.write(2, text.encode(errors="replace"))


@dataclass
class FailureOutput:
    """Where the card of a raised error is shown.

    Attributes:
        show: shows the card. The command line prints it last; the Python API does not, because Python prints the error.
        reported: whether this rank or another one has reported the raised error. Then the caller prints nothing.
    """

    show: Callable[[str], None] = lambda text: None
    reported: bool = False
