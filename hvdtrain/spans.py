"""Record timed spans, in every run; this module imports no other, so that every module may use it."""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple, Protocol

SIZES = 64
"""Number of steps for which batch sizes are kept."""

CAPACITY = 1 << 15
"""Spans that are kept, about 5 MB; the oldest are dropped first."""

MAIN, DEVICE, EXCHANGE = 0, 1, 2
"""Tracks of a trace: the training thread, the CUDA device, and from `EXCHANGE` on one for each gradient bucket."""

JOURNAL_KEYS = {
    "data": "data_s",
    "copy": "copy_s",
    "gather": "gather_s",
    "activations": "activations_s",
    "forward": "forward_s",
    "backward": "backward_s",
    "wait": "exposed_comm_s",
    "clip": "clip_s",
    "optimizer": "optimizer_s",
}
"""Parts of a step in their order, by the names of their spans, with their keys in the journal."""

GATHER, ACTIVATIONS = NESTED = ("gather", "activations")
"""The waits for parameters and for activations of other ranks. Their spans are nested in others, such as forward, which
do not count them."""

PARTS = (*JOURNAL_KEYS, "aside")
"""The same with aside: evaluations and checkpoints since the previous step."""

APART = "apart"
"""A span without length: the step has ended without an exchange with all ranks, unless a wait follows."""

RawEvent = tuple[str, int, int, int, int]
"""The fields of an `Event`."""


class Event(NamedTuple):
    """A span that has ended, by the recorder's clock."""

    name: str  # of the work
    track: int  # of the trace; spans of one track follow each other or are nested
    start_ns: int
    end_ns: int
    step: int  # its optimizer step, counted from 1; 0 before the first


class Listener(Protocol):
    """Called when a span of the training thread begins and ends: ranges of a profiler, or a device's own clock."""

    def enter(self, name: str) -> None:
        """Begin a span."""

    def exit(self, name: str) -> None:
        """End the innermost span."""

    def pop_seconds(self) -> dict[str, float]:
        """Return the seconds by name since the last call; they replace those of the host's clock."""
        return {}


class Spans:
    """Spans of the training thread, and the sums of their durations.

    A span is never nested in another of the same name. Any thread may call `open` and `idle_s`; only the training
    thread may call the other methods.
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns, capacity: int = CAPACITY) -> None:
        self.step = 0  # the current optimizer step, counted from 1; the training loop sets it
        self.listeners: list[Listener] = []  # called for each span
        self.listeners_to: dict[str, list[Listener]] = {}  # further ones, by the only spans that they are called for
        self.labels: dict[int, Mapping[str, Any]] = {}  # of a track that has one: a bucket's name and parameters
        self.sizes: dict[int, int] = {}  # of the newest steps: elements of the largest tensor of this rank's batches
        self.on_synchronized: Callable[[Any, bool], None] | None = None  # see `HostCopy`; set by a device's listener
        self.now = clock
        self._events: deque[RawEvent] = deque(maxlen=capacity)
        self._spans: dict[str, _Span] = {}
        self._innermost: _Span | None = None  # of the open ones
        self._touched = clock()
        self._collection_began = 0

    def __call__(self, name: str) -> _Span:
        """Return a context manager that records a span of the training thread."""
        span = self._spans.get(name)
        if span is None:
            span = self._spans[name] = _Span(self, name)
        return span

    def waiting_for(self, tensor: Any) -> AbstractContextManager[object]:
        """Return a context that records a wait for activations within forward or backward, else nothing.

        `tensor`: what is received, or like it. On a GPU the host does not wait, and backward has a thread of its own.
        """
        within = None if tensor.is_cuda or self._innermost is None else self._innermost.name
        return self(ACTIVATIONS) if within in ("forward", "backward") else nullcontext()

    def record(self, name: str, start_ns: int, track: int = MAIN, end_ns: int | None = None, step: int = -1) -> None:
        """Record a span that was measured elsewhere, by `now`; by default it ends now. It counts in no sum."""
        end = self.now() if end_ns is None else end_ns
        self._events.append((name, track, start_ns, end, self.step if step < 0 else step))

    def add_size(self, elements: int) -> None:
        """Add the size of a batch of the current step."""
        self.sizes[self.step] = self.sizes.get(self.step, 0) + elements
        if len(self.sizes) > SIZES:
            del self.sizes[next(iter(self.sizes))]

    def pop_seconds(self) -> dict[str, float]:
        """Return the seconds by name since the last call."""
        seconds = {}
        for name, span in self._spans.items():
            if span.total_ns:
                seconds[name] = span.total_ns * 1e-9
                span.total_ns = 0
        for listener in self.listeners:
            seconds.update(listener.pop_seconds())
        return seconds

    def events(self, first_step: int = 0) -> list[Event]:
        """Return the kept spans of step `first_step` and later, in the order of their recording."""
        return [Event(*event) for event in self.raw_events(first_step)]

    def raw_events(self, first_step: int = 0) -> list[RawEvent]:
        """Return the same as plain tuples, for frequent callers."""
        try:
            return _since(first_step, reversed(self._events))
        except RuntimeError:  # a garbage collection during the loop has recorded itself; a copy is safe
            return _since(first_step, reversed(list(self._events)))

    def open(self) -> list[tuple[str, float]]:
        """Return the names of the open spans, outermost first, with the seconds since they began."""
        now, span, found = self.now(), self._innermost, list[tuple[str, float]]()
        while span is not None and len(found) < len(self._spans):  # another thread may change them meanwhile
            found.append((span.name, (now - span.start_ns) * 1e-9))
            span = span.outer
        return found[::-1]

    def touch(self) -> None:
        """Note that the training thread makes progress within a long span."""
        self._touched = self.now()

    def idle_s(self) -> float:
        """Return the seconds since the training thread last began or ended a span, or called `touch`."""
        return (self.now() - self._touched) * 1e-9

    @contextmanager
    def collections(self) -> Iterator[None]:
        """Record Python's garbage collections of generations 1 and 2, the long ones, as spans named gc."""
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
            end = self.now()  # while another thread collects, the training thread may end spans and begin others
            self.record("gc", min(end, max(self._collection_began, self._touched)), end_ns=end)


def _since(first_step: int, newest_first: Iterable[RawEvent]) -> list[RawEvent]:
    events = []
    for event in newest_first:
        if event[4] < first_step - 1:  # a device's durations of a step arrive with the next step
            break
        if event[4] >= first_step:
            events.append(event)
    return events[::-1]


class _Span:
    """One name of a recorder, reused for each span: creating an object would cost more than timing it."""

    __slots__ = ("_is_nested", "_own", "_recorder", "name", "outer", "start_ns", "total_ns")

    def __init__(self, recorder: Spans, name: str) -> None:
        self._recorder = recorder
        self._is_nested = name in NESTED
        self._own = recorder.listeners_to.setdefault(name, [])
        self.name = name
        self.outer: _Span | None = None  # the span that this one is in, while it is open
        self.start_ns = 0
        self.total_ns = 0

    def __enter__(self) -> None:
        recorder = self._recorder
        self.outer, recorder._innermost = recorder._innermost, self
        if recorder.listeners or self._own:
            for listener in (*recorder.listeners, *self._own):
                listener.enter(self.name)
        self.start_ns = recorder._touched = recorder.now()

    def __exit__(self, *exception: object) -> None:
        recorder = self._recorder
        end = recorder._touched = recorder.now()
        recorder._innermost = self.outer
        self.total_ns += end - self.start_ns
        if self._is_nested and self.outer is not None:
            self.outer.total_ns -= end - self.start_ns
        recorder._events.append((self.name, MAIN, self.start_ns, end, recorder.step))
        if recorder.listeners or self._own:
            # After a device error a listener fails too; that must not replace the first error.
            with suppress(Exception) if exception[0] is not None else nullcontext():
                for listener in reversed((*recorder.listeners, *self._own)):
                    listener.exit(self.name)
