"""Signals as notices: taken at once, acted on at a step boundary that all ranks agree on."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

SAVE, TERMINATE, INTERRUPT = range(3)
_SIGNALS = {signal.SIGUSR1: SAVE, signal.SIGTERM: TERMINATE, signal.SIGINT: INTERRUPT}
_SIGNAL_OF = {notice: number for number, notice in _SIGNALS.items()}


class Notices:
    """A context manager that holds SIGUSR1 (save), SIGTERM and SIGINT (save and stop) back until they are taken.

    A second SIGINT interrupts at once. Signals can be held in the main thread only; elsewhere nothing is held.
    """

    def __init__(self) -> None:
        self._pending = [0] * len(_SIGNALS)
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Notices:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def take(self) -> list[int]:
        """How often each notice came to this rank since last time: [save, terminate, interrupt]."""
        taken, self._pending = self._pending, [0] * len(_SIGNALS)
        return taken

    def _note(self, number: int, frame: FrameType | None) -> None:
        notice = _SIGNALS[signal.Signals(number)]
        if notice == INTERRUPT and self._pending[INTERRUPT]:
            raise KeyboardInterrupt
        self._pending[notice] += 1


def stop_reason(notices: list[int]) -> str | None:
    """The signal's name if the ranks' summed notices ask for a stop."""
    asked = [notice for notice in (TERMINATE, INTERRUPT) if notices[notice]]
    return signal.Signals(_SIGNAL_OF[asked[0]]).name if asked else None
