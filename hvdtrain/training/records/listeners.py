"""What listens to spans: the clock of a CUDA device, NVTX ranges for Nsight Systems, and torch.profiler.

The device's durations are those of events that are read after they have happened, so that nothing waits for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hvdtrain.config.windows import OFF, Window
from hvdtrain.observe.span_trace import free_path
from hvdtrain.run_layout import TimelineLayout
from hvdtrain.spans import DEVICE, JOURNAL_KEYS, NESTED, Listener, Spans

ON_DEVICE = frozenset(JOURNAL_KEYS) - {"data", *NESTED}
"""Spans with work on the device. Their durations on the host are the times to launch that work."""


def timing_event() -> Any:
    """Make an event of a CUDA device that measures the time to another one."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


SLACK_NS = 100e3  # a thread that waits for an event continues so soon after it


class _Pending(NamedTuple):
    """A span with events that may not have happened yet; the host began it at `asked_ns`."""

    name: str
    step: int
    start: Any
    end: Any
    asked_ns: int


class DeviceSpans:
    """Listens to `spans`, and records an event in the device's current stream when a span begins and ends.

    The time between the event at the end of backward and the one after the wait is the exposed communication: the
    device is idle then. Durations arrive late: those of a step's optimizer with the next step.

    `spans`: receives the device's spans, timed by its own clock. `event`: makes a timing event: `record()`, `query()`,
    `elapsed_time(later)` in ms, `synchronize()`.
    """

    def __init__(self, spans: Spans, event: Callable[[], Any] = timing_event) -> None:
        self._spans = spans
        self._event = event
        self._free: list[Any] = []
        self._open: list[tuple[str, Any, int]] = []
        self._pending: deque[_Pending] = deque()
        # Event times are float32 milliseconds, exact only over short distances: each is measured from the previous one.
        self._last = event()
        self._last.record()
        self._last.synchronize()
        self._last_ns = self._end_ns = float(spans.now())
        spans.on_synchronized = self.synchronized

    def synchronized(self, event: Any, waited: bool) -> None:
        """Set the device's clock by an event for which the host has just waited.

        Without it the clock drifts where the device is never idle: spans begin when the ones before end.
        """
        now_ns = self._spans.now()
        found_ns = self._last_ns + self._last.elapsed_time(event) * 1e6
        least_ns = now_ns - SLACK_NS if waited else found_ns
        self._last_ns += min(max(found_ns, least_ns), now_ns) - found_ns

    def enter(self, name: str) -> None:
        """Begin a span."""
        self._open.append((name, self._mark() if name in ON_DEVICE else None, self._spans.now()))

    def exit(self, name: str) -> None:
        """End the innermost span."""
        opened, start, asked_ns = self._open.pop()
        if start is not None:
            self._pending.append(_Pending(opened, self._spans.step, start, self._mark(), asked_ns))

    def pop_seconds(self) -> dict[str, float]:
        """Return the device seconds of spans that ended on the device since the last call."""
        seconds = dict.fromkeys(ON_DEVICE, 0.0)
        ended = []
        while self._pending and self._pending[0].end.query():
            ended.append(self._pending.popleft())
        if ended:
            # The clocks of device and host drift apart: ended spans are in the past ...
            late_ns = self._last_ns + self._last.elapsed_time(ended[-1].end) * 1e6 - self._spans.now()
            self._last_ns -= max(0.0, late_ns)
        for span in ended:
            # ... and work begins after its launch.
            begun_ns = max(self._last_ns + self._last.elapsed_time(span.start) * 1e6, span.asked_ns)
            duration_ns = span.start.elapsed_time(span.end) * 1e6
            self._free += [self._last, span.start]
            self._last, self._last_ns = span.end, begun_ns + duration_ns
            start_ns = max(begun_ns, self._end_ns)  # spans do not overlap, also where the clock was set back
            self._end_ns = max(start_ns, self._last_ns)
            seconds[span.name] += duration_ns * 1e-9
            self._spans.record(span.name, round(start_ns), DEVICE, round(self._end_ns), span.step)
        return seconds

    def _mark(self) -> Any:
        event = self._free.pop() if self._free else self._event()
        event.record()
        return event


class NvtxRanges(Listener):
    """Opens an NVTX range of the same name around each span; Nsight Systems shows them next to the kernels."""

    def enter(self, name: str) -> None:
        """Open a range."""
        torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]

    def exit(self, name: str) -> None:
        """Close the innermost range."""
        torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


@dataclass
class TorchProfile(Listener):
    """Writes ``RUN/timeline/torch-steps-FIRST-LAST-rank-N.json``: operators and kernels, named by span.

    A failure costs the profile, not the training: it calls `warn`. `folder` is ``RUN/timeline``.
    """

    spans: Spans
    folder: Path
    rank: int
    window: Window
    warn: Callable[[str], None]
    _profile: Any = None
    _first: int = 0
    _open: list[Any] = field(default_factory=list)

    def begin_step(self, step: int) -> None:
        """Begin before the first step of the window, end after its last."""
        if self._profile is not None and step not in self.window:
            self._end(step - 1)
        elif self._profile is None and step in self.window:
            self._begin(step)

    def enter(self, name: str) -> None:
        """Open a range of torch.profiler for a span."""
        opened = torch.profiler.record_function(name)
        opened.__enter__()  # type: ignore[no-untyped-call]
        self._open.append(opened)

    def exit(self, name: str) -> None:
        """Close the innermost range; ignore a span that began before the profile."""
        if self._open:
            self._open.pop().__exit__(None, None, None)

    def close(self) -> None:
        """End a profile in progress."""
        if self._profile is not None:
            self._end(self.spans.step)

    def _begin(self, step: int) -> None:
        self._first = step
        try:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            # acc_events: torch 2.11 warns without it, and there is one cycle.
            profile = torch.profiler.profile(activities=activities, record_shapes=True, acc_events=True)
            profile.start()
        except (RuntimeError, AssertionError) as error:
            self.warn(f"torch.profiler does not start: {error}; training continues")
            self.window = OFF
            return
        self._profile = profile
        self.spans.listeners.append(self)

    def _end(self, last: int) -> None:
        profile, self._profile = self._profile, None
        self.spans.listeners.remove(self)
        path = free_path(TimelineLayout(self.folder).torch_profile(self._first, last, self.rank))
        try:
            profile.stop()
            self.folder.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            self.warn(f"cannot write the profile {path}: {error}; training continues")
