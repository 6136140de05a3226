"""Spans as a Chrome trace, one file a rank: the first steps of a start, a window of them, and the last ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hvdtrain.config.windows import Window
from hvdtrain.observe.trace_file import TraceFile, free_path
from hvdtrain.run_layout import TimelineLayout
from hvdtrain.runtime.clock import clock_id, moment
from hvdtrain.spans import CAPACITY, DEVICE, EXCHANGE, MAIN, Event, Spans

LAST_STEPS = 20
"""Steps before the end of which the trace tells in any case."""

_MOST_TOGETHER = 200
"""Steps of a window that are written together at most; fewer where steps have many spans."""


class SpanTrace:
    """Writes the spans of some steps to ``RUN/timeline/spans-rank-N.json``; a later start of the run adds a file.

    Nothing is written while a step is under way, and what cannot be written costs the trace, not the training.

    Args:
        spans: of this rank.
        folder: ``RUN/timeline``, made when needed; on a host that does not share it, a folder of that name there.
        rank, host: stand in the trace as its process.
        window: the steps to write as they come.
        warn: told when the trace cannot be written.
        start: number of this start of the run.
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
        self._began = moment()
        self._start = start
        self._file: TraceFile | None = None
        self._failed = False
        self._tracks: set[int] = set()
        self._labels: dict[int, Mapping[str, Any]] = {}
        self._next = 0
        self._due = 0

    def begin_step(self, step: int) -> None:
        """Step `step` is about to be done; write those before it where they are due."""
        over = step - 2  # what a device did in the step just done may not be known yet
        if over not in self._window or (over < self._due and over != self._window.last):
            return
        events = self._spans.events(self._next)
        self._write([e for e in events if e.step <= over and self._is_in(e.step)])
        self._next = over + 1
        a_step = sum(e.step == over for e in events)
        self._due = over + max(1, min(_MOST_TOGETHER, CAPACITY // 4 // max(1, a_step)))

    def record(self, window: Window) -> None:
        """Write these steps too, the first of which is yet to come; or end with them those that are being written."""
        step = self._spans.step
        under_way = step in self._window or step - 1 in self._window  # the last one is written in two steps only
        self._window = Window(self._window.first, window.last) if under_way else window
        self._due = 0

    def close(self) -> None:
        """Write what is left of the window, and the last steps."""
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
            self._warn(f"the trace {self._path} ends here: {error.strerror or error}; training goes on")

    def _head(self) -> Iterator[dict[str, Any]]:
        name = f"rank {self._rank} on {self._host}"
        yield {"name": "process_name", "ph": "M", "pid": self._rank, "tid": 0, "args": {"name": name}}
        yield {"name": "process_sort_index", "ph": "M", "pid": self._rank, "tid": 0, "args": {"sort_index": self._rank}}
        began_us = self._began_ns / 1e3
        clock = {
            "start_time_since_epoch_in_micros": round(self._began.epoch_us + began_us - self._began.monotonic_us),
            "monotonic_us": began_us,
            "clock_id": clock_id(),
            "start": self._start,
        }
        yield {"name": "clock", "ph": "M", "pid": self._rank, "tid": 0, "args": clock}

    def _lines(self, events: list[Event]) -> Iterator[dict[str, Any]]:
        for event in events:
            if event.start_ns < self._began_ns:  # a garbage collection while the ranks' states were made equal
                continue
            label = self._spans.labels.get(event.track)
            if label is not None and label is not self._labels.get(event.track):
                self._labels[event.track] = label
                yield self._line("bucket", "M", event.track, args=label)
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
