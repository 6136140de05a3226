"""Integers that each step sums over ranks: pending signals first, then those of other parts."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

SAVE, TERMINATE, INTERRUPT, CHANGED = range(4)
_SIGNALS = {signal.SIGUSR1: SAVE, signal.SIGTERM: TERMINATE, signal.SIGINT: INTERRUPT}
COUNT = 4
"""Number of requests: one a signal, and that ranks join or leave."""


class PendingSignals:
    """A context manager that counts SIGUSR1 (save), SIGTERM and SIGINT (save and stop) instead of acting on them.

    The ranks act on them together at the end of a step. A second SIGINT interrupts at once. Only the main thread can
    do this; in another thread the signals act as usual.

    If an error leaves the context, the signals stay blocked: the launcher sends SIGTERM soon after another rank has
    died, and this rank must still report why. `handlers_as_before` restores the handlers then.

    Nested use changes nothing.

    Args:
        stop_on_usr1: SIGUSR1 means save and stop, too.
    """

    def __init__(self, *, stop_on_usr1: bool = False) -> None:
        self._requests = {**_SIGNALS, signal.SIGUSR1: TERMINATE if stop_on_usr1 else SAVE}
        self._pending = [0] * COUNT
        self._previous: dict[signal.Signals, Any] = {}
        self._depth = 0

    def __enter__(self) -> PendingSignals:
        self._depth += 1
        if self._depth == 1 and threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._count) for number in _SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._depth -= 1
        if kind is not None or self._depth:
            return
        _restore(self._previous)

    def pop(self) -> list[int]:
        """Return how often each signal arrived since the last call: [save, terminate, interrupt, changed]."""
        counts, self._pending = self._pending, [0] * COUNT
        return counts

    def _count(self, number: int, frame: FrameType | None) -> None:
        request = self._requests[signal.Signals(number)]
        if request == INTERRUPT and self._pending[INTERRUPT]:
            raise KeyboardInterrupt
        self._pending[request] += 1


@contextmanager
def handlers_as_before() -> Iterator[None]:
    """Restore the handlers of the signals that `PendingSignals` counts at the end."""
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        if is_main:
            _restore(before)


def _restore(handlers: dict[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def stop_reason(sums: Sequence[int]) -> str | None:
    """Return the name of the signal that asks for a stop, from the sums over ranks; None if none does."""
    for number in (signal.SIGTERM, signal.SIGINT):
        if sums[_SIGNALS[number]]:
            return number.name
    return None


class StepSums(Protocol):
    """A part with integers that each step sums over ranks."""

    def values(self) -> list[int]:
        """Return this rank's integers for the next step; always equally many."""

    def on_sums(self, step: int, sums: Sequence[int]) -> None:
        """Act on the sums of step `step`, equal on all ranks; not called if all parts have only 0. Collective: yes."""


class CombinedSums:
    """Several parts as one: joins their integers, and gives each part its own sums."""

    def __init__(self, *members: StepSums) -> None:
        self._members = members
        self._counts: list[int] = []

    def values(self) -> list[int]:
        """Return the integers of all parts."""
        parts = [member.values() for member in self._members]
        self._counts = [len(values) for values in parts]
        return [value for values in parts for value in values]

    def on_sums(self, step: int, sums: Sequence[int]) -> None:
        """Give each part its sums. Collective: yes."""
        if not any(sums):  # as nearly always
            return
        rest = list(sums)
        for member, count in zip(self._members, self._counts, strict=True):
            own, rest = rest[:count], rest[count:]
            member.on_sums(step, own)
