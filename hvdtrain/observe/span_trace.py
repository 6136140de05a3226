"""Writes spans as Chrome traces, one file per rank: startup, a window of steps, and the last steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from hvdtrain.config.windows import Window
from hvdtrain.observe.span_format import BUCKET, CLOCK, SpanClock, title
from hvdtrain.observe.trace_file import TraceFile, free_path
from hvdtrain.run_layout import TimelineLayout
from hvdtrain.runtime.clock import clock_id, read_clocks
from hvdtrain.spans import CAPACITY, DEVICE, EXCHANGE, MAIN, Event, Spans

LAST_STEPS = 20
"""Number of steps before the end that are always in the trace."""

_MOST_TOGETHER = 200
"""Largest number of window steps written together; fewer if steps have many spans."""


class SpanTrace:
    """Writes the spans of some steps to ``RUN/timeline/spans-rank-N.json``; a later start of the run adds a file.

    Nothing is written during a step. A write error ends the trace with a warning; training continues.

    Args:
        spans: of this rank.
        folder: ``RUN/timeline``, created when needed; a local folder of that name on a host that does not share it.
        rank: number, shown in the trace.
        host: name, shown in the trace.
        window: the steps to write.
        warn: called once on a write error.
        start: number of this start.
    """

    def __init__(
        self,
        spans: Spans,
        folder: Path,
        rank: int,
        host: str,
        window: Window,
        warn: Callable[[str], None],
        start: int = 0,
    ) -> None:
        self._spans = spans
        self._path = TimelineLayout(folder).spans(rank)
        self._rank = rank
        self._host = host
        self._window = window
        self._warn = warn
        self._began_ns = spans.now()
        self._began = read_clocks()
        self._start = start
        self._file: TraceFile | None = None
        self._failed = False
        self._tracks: set[int] = set()
        self._labels: dict[int, Mapping[str, Any]] = {}
        self._next = 0
        self._due = 0

    def begin_step(self, step: int) -> None:
        """Write earlier steps if due, before step `step`."""
        over = step - 2  # device spans of the step before may not be known yet
        if over not in self._window or (over < self._due and over != self._window.last):
            return
        events = self._spans.events(self._next)
        self._write([e for e in events if e.step <= over and self._is_in(e.step)])
        self._next = over + 1
        a_step = sum(e.step == over for e in events)
        self._due = over + max(1, min(_MOST_TOGETHER, CAPACITY // 4 // max(1, a_step)))

    def record(self, window: Window) -> None:
        """Write the steps of a new window; or end the current window with it."""
        step = self._spans.step
        is_open = step in self._window or step - 1 in self._window  # the last step is written two steps later
        self._window = Window(self._window.first, window.last) if is_open else window
        self._due = 0

    def close(self) -> None:
        """Write the rest of the window, and the last steps."""
        recent = self._spans.step - LAST_STEPS + 1
        kept = self._spans.events(min(self._next, recent))
        self._write([e for e in kept if e.step >= (self._next if self._is_in(e.step) else recent)])
        if self._file is not None:
            self._file.close()

    def _is_in(self, step: int) -> bool:
        return step == 0 or step in self._window

    def _write(self, events: list[Event]) -> None:
        if self._failed:
            return
        try:
            if self._file is None:
                self._file = TraceFile(free_path(self._path), list(self._head()))
            self._file.append(list(self._lines(events)))
        except OSError as error:
            self._failed = True
            self._warn(f"the trace {self._path} ends here: {error.strerror or error}; training continues")

    def _head(self) -> Iterator[dict[str, Any]]:
        yield self._line("process_name", "M", 0, args={"name": title(self._rank, self._host)})
        yield self._line("process_sort_index", "M", 0, args={"sort_index": self._rank})
        began_us = self._began_ns / 1e3
        epoch_us = round(self._began.epoch_us + began_us - self._began.monotonic_us)
        clock = SpanClock(epoch_us, began_us, clock_id(), self._start)
        yield self._line(CLOCK, "M", 0, args=msgspec.structs.asdict(clock))

    def _lines(self, events: list[Event]) -> Iterator[dict[str, Any]]:
        for event in events:
            if event.start_ns < self._began_ns:  # a garbage collection before training began
                continue
            label = self._spans.labels.get(event.track)
            if label is not None and label is not self._labels.get(event.track):
                self._labels[event.track] = label
                yield self._line(BUCKET, "M", event.track, args=label)
            if event.track not in self._tracks:
                self._tracks.add(event.track)
                names = {MAIN: "training thread", DEVICE: "device"}
                name = names.get(event.track, f"exchange of bucket {event.track - EXCHANGE}")
                yield self._line("thread_name", "M", event.track, args={"name": name})
            yield self._line(
                event.name,
                "X",
                event.track,
                ts=(event.start_ns - self._began_ns) / 1e3,
                dur=(event.end_ns - event.start_ns) / 1e3,
                args={"step": event.step},
            )

    def _line(self, name: str, phase: str, track: int, **rest: Any) -> dict[str, Any]:
        return {"name": name, "ph": phase, "pid": self._rank, "tid": track, **rest}
