"""Durations on a CUDA device: events that are read once they have happened, so that nobody waits for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from hvdtrain.spans import DEVICE, Spans

ON_DEVICE = frozenset({"copy", "forward", "backward", "wait", "clip", "optimizer"})
"""Spans whose work the device does. The host's durations of these tell how long it took to ask for it."""


def timing_event() -> Any:
    """An event of a CUDA device that tells the time to another one."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class _Pending(NamedTuple):
    """A span whose events may not have happened yet; `asked_ns` is when the host began it."""

    name: str
    step: int
    start: Any
    end: Any
    asked_ns: int


class DeviceSpans:
    """Listens to `spans` and puts an event into the device's current stream where a span begins and ends.

    The time between the event at the end of backward and the one after the wait is what the device stood still for the
    exchange: the exposed communication. Durations come late: those of a step's optimizer with the next step.

    Args:
        spans: told of the device's spans, by its own clock.
        event: makes a timing event: `record()`, `query()`, `elapsed_time(later)` in ms, `synchronize()`.
    """

    def __init__(self, spans: Spans, event: Callable[[], Any] = timing_event) -> None:
        self._spans = spans
        self._event = event
        self._free: list[Any] = []
        self._open: list[tuple[str, Any, int]] = []
        self._pending: deque[_Pending] = deque()
        # Event times are float32 milliseconds: exact only over short distances, so each is taken from the one before.
        self._last = event()
        self._last.record()
        self._last.synchronize()
        self._last_ns = self._end_ns = float(spans.now())

    def enter(self, name: str) -> None:
        """A span begins."""
        self._open.append((name, self._mark() if name in ON_DEVICE else None, self._spans.now()))

    def exit(self, name: str) -> None:
        """The innermost span ends."""
        opened, start, asked_ns = self._open.pop()
        if start is not None:
            self._pending.append(_Pending(opened, self._spans.step, start, self._mark(), asked_ns))

    def take(self) -> dict[str, float]:
        """Device seconds of the spans that have ended there since it was last asked."""
        seconds = dict.fromkeys(ON_DEVICE, 0.0)
        over = []
        while self._pending and self._pending[0].end.query():
            over.append(self._pending.popleft())
        if over:
            # The device's clock and the host's drift apart: what is over lies before now ...
            late_ns = self._last_ns + self._last.elapsed_time(over[-1].end) * 1e6 - self._spans.now()
            self._last_ns -= max(0.0, late_ns)
        for span in over:
            # ... and work begins after it was asked for.
            start_ns = max(self._last_ns + self._last.elapsed_time(span.start) * 1e6, span.asked_ns, self._end_ns)
            duration_ns = span.start.elapsed_time(span.end) * 1e6
            self._free += [self._last, span.start]
            self._last, self._last_ns = span.end, start_ns + duration_ns
            self._end_ns = self._last_ns
            seconds[span.name] += duration_ns * 1e-9
            self._spans.record(span.name, round(start_ns), DEVICE, round(self._end_ns), span.step)
        return seconds

    def _mark(self) -> Any:
        event = self._free.pop() if self._free else self._event()
        event.record()
        return event
