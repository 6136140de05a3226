"""Hands what happens in a run to those who record and show it."""

from __future__ import annotations

from typing import Any

from hvdtrain.observe.journal import Journal
from hvdtrain.observe.progress import Progress


class Recorder:
    """The journal and the display as one observer.

    Args:
        journal: None on ranks other than 0.
        display: quiet on ranks other than 0.
    """

    def __init__(self, journal: Journal | None, display: Progress) -> None:
        self._journal = journal
        self._display = display

    def begin(self, total: int) -> None:
        """Steps are about to come, up to step `total`."""
        self._display.begin(total)

    def step(self, record: dict[str, Any]) -> None:
        """Record and show a step."""
        if self._journal is not None:
            self._journal.write(record)
        self._display.step(record)

    def event(self, record: dict[str, Any]) -> None:
        """Record an event."""
        if self._journal is not None:
            self._journal.write(record)

    def say(self, text: str) -> None:
        """Show a line."""
        self._display.say(text)

    def warn(self, text: str) -> None:
        """Record and show something that a person should know."""
        self.event({"event": "warning", "text": text})
        self._display.say(f"warning: {text}")

    def close(self) -> None:
        """End the display and close the journal."""
        self._display.close()
        if self._journal is not None:
            self._journal.close()
