"""Where the time goes: a recorder of timed spans, always on; a leaf that every module may use."""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple, Protocol

CAPACITY = 1 << 15
"""Spans that are kept, some 5 MB; the oldest go first."""

MAIN, DEVICE, EXCHANGE = 0, 1, 2
"""Tracks of a trace: the training thread, the CUDA device, and from `EXCHANGE` on one a bucket of gradients."""

PARTS = ("data", "copy", "forward", "backward", "wait", "clip", "optimizer", "aside")
"""Parts of a step by name of their spans; aside: evaluations and checkpoints since the step before."""

RawEvent = tuple[str, int, int, int, int]
"""The fields of an `Event`."""


class Event(NamedTuple):
    """A span that is over.

    Attributes:
        name: what was done.
        track: where; spans of one track lie beside or inside of each other.
        start_ns: by the recorder's clock.
        end_ns: by the recorder's clock.
        step: the optimizer step it belongs to, counted from 1; 0 before the first.
    """

    name: str
    track: int
    start_ns: int
    end_ns: int
    step: int


class Listener(Protocol):
    """Told when a span of the training thread begins and ends: ranges of a profiler, or a device's own clock."""

    def enter(self, name: str) -> None:
        """A span begins."""
        ...

    def exit(self, name: str) -> None:
        """The innermost span ends."""
        ...

    def take(self) -> dict[str, float]:
        """Seconds by name that stand in the place of the host's, known since it was last asked."""
        ...


class Spans:
    """Spans of the training thread, and the sums of their durations since they were last taken.

    A span of one name is not opened inside of another of the same name. `open` and `idle_s` may be called from any
    thread, everything else from the training thread.

    Attributes:
        step: the optimizer step being done, counted from 1; set by the training loop.
        listeners: told of each span.
        labels: what a track stands for, where that was told: a bucket's name and parameters.
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns, capacity: int = CAPACITY) -> None:
        self.step = 0
        self.listeners: list[Listener] = []
        self.labels: dict[int, Mapping[str, Any]] = {}
        self.now = clock
        self._events: deque[RawEvent] = deque(maxlen=capacity)
        self._spans: dict[str, _Span] = {}
        self._open: list[_Span] = []
        self._touched = clock()
        self._collection_began = 0

    def __call__(self, name: str) -> _Span:
        """A context manager that records a span of the training thread."""
        span = self._spans.get(name)
        if span is None:
            span = self._spans[name] = _Span(self, name)
        return span

    def record(self, name: str, start_ns: int, track: int = MAIN, end_ns: int | None = None, step: int = -1) -> None:
        """Keep a span that was measured elsewhere, by `now`; it counts in no sum. It ends now and belongs to `step`."""
        end = self.now() if end_ns is None else end_ns
        self._events.append((name, track, start_ns, end, self.step if step < 0 else step))

    def take(self) -> dict[str, float]:
        """Seconds by name since they were last taken."""
        seconds = {}
        for name, span in self._spans.items():
            if span.total_ns:
                seconds[name] = span.total_ns * 1e-9
                span.total_ns = 0
        for listener in self.listeners:
            seconds.update(listener.take())
        return seconds

    def events(self, first_step: int = 0) -> list[Event]:
        """The spans that are kept of step `first_step` and later ones, in the order in which they were recorded."""
        return [Event(*event) for event in self.raw_events(first_step)]

    def raw_events(self, first_step: int = 0) -> list[RawEvent]:
        """The same as bare tuples, for those who look often."""
        try:
            return _since(first_step, reversed(self._events))
        except RuntimeError:  # a garbage collection amid the loop has recorded itself: it cannot spoil a copy
            return _since(first_step, reversed(list(self._events)))

    def open(self) -> list[tuple[str, float]]:
        """Names of the spans that the training thread is in, outermost first, with the seconds since they began."""
        now = self.now()
        return [(span.name, (now - span.start_ns) * 1e-9) for span in list(self._open)]

    def touch(self) -> None:
        """Note that the training thread makes progress inside of a long span."""
        self._touched = self.now()

    def idle_s(self) -> float:
        """Seconds since the training thread last began or ended a span, or was said to make progress."""
        return (self.now() - self._touched) * 1e-9

    @contextmanager
    def collections(self) -> Iterator[None]:
        """Record Python's garbage collections as spans named gc: those of generations 1 and 2, the long ones."""
        gc.callbacks.append(self._on_collection)
        try:
            yield
        finally:
            gc.callbacks.remove(self._on_collection)

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] == 0:
            return
        if phase == "start":
            self._collection_began = self.now()
        else:
            self.record("gc", self._collection_began)


def _since(first_step: int, newest_first: Iterable[RawEvent]) -> list[RawEvent]:
    found = []
    for event in newest_first:
        if event[4] < first_step - 1:  # a device's durations of a step come with the next one
            break
        if event[4] >= first_step:
            found.append(event)
    return found[::-1]


class _Span:
    """One name of a recorder, used again each time: making an object a span would cost more than timing it."""

    __slots__ = ("_recorder", "name", "start_ns", "total_ns")

    def __init__(self, recorder: Spans, name: str) -> None:
        self._recorder = recorder
        self.name = name
        self.start_ns = 0
        self.total_ns = 0

    def __enter__(self) -> None:
        recorder = self._recorder
        recorder._open.append(self)
        if recorder.listeners:
            for listener in recorder.listeners:
                listener.enter(self.name)
        self.start_ns = recorder._touched = recorder.now()

    def __exit__(self, *exception: object) -> None:
        recorder = self._recorder
        end = recorder._touched = recorder.now()
        recorder._open.pop()
        self.total_ns += end - self.start_ns
        recorder._events.append((self.name, MAIN, self.start_ns, end, recorder.step))
        if recorder.listeners:
            # After a fault of the device a listener fails too, which must not stand in the place of the first error.
            with suppress(Exception) if exception[0] is not None else nullcontext():
                for listener in reversed(recorder.listeners):
                    listener.exit(self.name)
