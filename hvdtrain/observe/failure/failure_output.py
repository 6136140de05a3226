"""How the text of a failure reaches a person."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass


def to_stderr(text: str) -> None:
    """Show a text at once and whole: by one write, past Python's buffers, whose locks a stuck thread may hold."""
    with suppress(OSError):
        os.write(2, text.encode(errors="replace"))


def nowhere(text: str) -> None:
    """Show nothing."""


@dataclass
class FailureOutput:
    """How an error that a rank raises is shown: by the command, last on the screen; not at all where Python will.

    Attributes:
        show: shows the card.
        told: whether an error that was raised has been told, by this rank or another: the caller stays silent then.
    """

    show: Callable[[str], None] = nowhere
    told: bool = False
