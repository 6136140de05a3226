"""Durations on a CUDA device: events that are read once they have happened, so that nobody waits for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from hvdtrain.spans import DEVICE, Spans

ON_DEVICE = frozenset({"copy", "forward", "backward", "wait", "clip", "optimizer"})
"""Spans whose work the device does. The host's durations of these tell how long it took to ask for it."""


def _timing_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class DeviceSpans:
    """Listens to `spans` and puts an event into the device's current stream where a span begins and ends.

    The time between the event at the end of backward and the one after the wait is what the device stood still for the
    exchange: the exposed communication. Durations come late: those of a step's optimizer with the next step.

    Args:
        spans: told of the device's spans, by its own clock.
        event: makes a timing event: `record()`, `query()`, `elapsed_time(later)` in ms, `synchronize()`.
    """

    def __init__(self, spans: Spans, event: Callable[[], Any] = _timing_event) -> None:
        self._spans = spans
        self._event = event
        self._open: list[tuple[str, Any]] = []
        self._pending: deque[tuple[str, int, Any, Any]] = deque()
        # Event times are float32 milliseconds: exact only over short distances, so each is taken from the one before.
        self._last = event()
        self._last.record()
        self._last.synchronize()
        self._last_ns = float(spans.now())

    def enter(self, name: str) -> None:
        """A span begins."""
        self._open.append((name, self._mark() if name in ON_DEVICE else None))

    def exit(self, name: str) -> None:
        """The innermost span ends."""
        opened, start = self._open.pop()
        if start is not None:
            self._pending.append((opened, self._spans.step, start, self._mark()))

    def take(self) -> dict[str, float]:
        """Device seconds of the spans that have ended there since it was last asked."""
        seconds = dict.fromkeys(ON_DEVICE, 0.0)
        while self._pending and self._pending[0][3].query():
            name, step, start, end = self._pending.popleft()
            start_ns = self._last_ns + self._last.elapsed_time(start) * 1e6
            duration_ns = start.elapsed_time(end) * 1e6
            self._last, self._last_ns = end, start_ns + duration_ns
            seconds[name] += duration_ns * 1e-9
            self._spans.record(name, round(start_ns), DEVICE, round(self._last_ns), step)
        return seconds

    def _mark(self) -> Any:
        event = self._event()
        event.record()
        return event
