"""Signals as notices: taken at once, acted on at a step boundary that all ranks agree on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SAVE, TERMINATE, INTERRUPT, CHANGED = range(4)
_SIGNALS = {signal.SIGUSR1: SAVE, signal.SIGTERM: TERMINATE, signal.SIGINT: INTERRUPT}
COUNT = 4
"""Of notices: those of signals, and that ranks come or go."""
_SIGNAL_OF = {notice: number for number, notice in _SIGNALS.items()}


class Notices:
    """A context manager that holds SIGUSR1 (save), SIGTERM and SIGINT (save and stop) back until they are taken.

    A second SIGINT interrupts at once. Signals can be held in the main thread only; elsewhere nothing is held.

    Left by an error it goes on holding them, so that the launcher's SIGTERM, which comes soon after another rank has
    died, does not end this one while it says why; `handlers_as_before` gives them back then.

    May be entered again inside of itself, which changes nothing.
    """

    def __init__(self) -> None:
        self._pending = [0] * COUNT
        self._previous: dict[signal.Signals, Any] = {}
        self._depth = 0

    def __enter__(self) -> Notices:
        self._depth += 1
        if self._depth == 1 and threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._depth -= 1
        if kind is not None or self._depth:
            return
        for number, handler in self._previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def take(self) -> list[int]:
        """How often each notice came to this rank since last time: [save, terminate, interrupt, changed]."""
        taken, self._pending = self._pending, [0] * COUNT
        return taken

    def _note(self, number: int, frame: FrameType | None) -> None:
        notice = _SIGNALS[signal.Signals(number)]
        if notice == INTERRUPT and self._pending[INTERRUPT]:
            raise KeyboardInterrupt
        self._pending[notice] += 1


@contextmanager
def handlers_as_before() -> Iterator[None]:
    """Let the handlers of the signals that `Notices` holds be at the end what they are at the beginning."""
    here = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items() if here else ():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def stop_reason(notices: list[int]) -> str | None:
    """The signal's name if the ranks' summed notices ask for a stop."""
    asked = [notice for notice in (TERMINATE, INTERRUPT) if notices[notice]]
    return signal.Signals(_SIGNAL_OF[asked[0]]).name if asked else None
