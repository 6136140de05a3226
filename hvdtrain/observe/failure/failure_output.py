"""Show the text of a failure on the screen."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass


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
