"""Writes spans as Chrome traces, one file per rank: startup, a window of steps, and the last steps."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Any

import msgspec
import orjson
from msgspec import Struct

from hvdtrain.config.windows import Window
from hvdtrain.run_layout import TimelineLayout
from hvdtrain.runtime.clock import clock_id, read_clocks
from hvdtrain.spans import CAPACITY, DEVICE, EXCHANGE, MAIN, Event, Spans

_END = b"\n]\n"


class TraceFile:
    """A growing JSON array of trace events: a new file with the `first` ones, at least one.

    A single write replaces the closing bracket by new events and a bracket, so the array is always closed. The format
    is the JSON array form of Google's "Trace Event Format", as in Horovod's Timeline. Perfetto and chrome://tracing
    read it.

    Errors: OSError: the file exists, or cannot be written.
    """

    def __init__(self, path: Path, first: Sequence[Mapping[str, Any]]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("xb", buffering=0)
        self._write(b"[\n" + _lines(first) + _END)

    def append(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Add events. Errors: OSError: the disk is full or lost."""
        if not events:
            return
        end = self._file.seek(-len(_END), 2)
        try:
            self._write(b",\n" + _lines(events) + _END)
        except OSError:  # a full disk may have written a part
            self._file.truncate(end)
            self._file.seek(end)
            self._write(_END)
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, content: bytes) -> None:
        rest = memoryview(content)
        while rest:  # on a full disk, a write is short and only the next one fails
            rest = rest[self._file.write(rest) :]


def free_path(path: Path) -> Path:
    """Return `path` if it does not exist, else the first free one of ``NAME-1.json``, ``NAME-2.json``, ..."""
    others = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in count(1))
    return next(each for each in chain([path], others) if not each.exists())


def _lines(events: Sequence[Mapping[str, Any]]) -> bytes:
    return b",\n".join(orjson.dumps(event) for event in events)


CLOCK, BUCKET = "clock", "bucket"
"""Names of our metadata events; their arguments are `SpanClock` and the fields of `BucketFacts`."""

_TITLE = re.compile(r"rank \d+ on (.*)", re.DOTALL)

LAST_STEPS = 20
"""Number of steps before the end that are always in the trace."""

_MOST_TOGETHER = 200
"""Largest number of window steps written together; fewer if steps have many spans."""


class SpanClock(Struct):
    """The clock of a span file."""

    start_time_since_epoch_in_micros: float  # the wall clock at the file's time 0
    monotonic_us: float = 0.0  # the rank's clock (`time.perf_counter_ns`) at the file's time 0
    clock_id: str = ""  # equal ones are the same clock
    start: int = -1  # number of the start; -1 if unknown


def title(rank: int, host: str) -> str:
    """Return the name of a rank's process in the trace."""
    return f"rank {rank} on {host}"


def host_of(process_title: str) -> str:
    """Return the host in a `title`; empty if it has another form."""
    found = _TITLE.fullmatch(process_title)
    return found[1] if found else ""


@dataclass
class SpanTrace:
    """Writes the spans of some steps to ``RUN/timeline/spans-rank-N.json``; a later start of the run adds a file.

    Nothing is written during a step. A write error ends the trace with a warning; training continues.
    """

    spans: Spans
    folder: Path  # ``RUN/timeline``, created when needed; a local folder of that name on a host that does not share it
    rank: int
    host: str
    window: Window
    warn: Callable[[str], None]  # called once on a write error
    start: int = 0
    _file: TraceFile | None = None
    _failed: bool = False
    _tracks: set[int] = field(default_factory=set)
    _labels: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    _next: int = 0
    _due: int = 0

    def __post_init__(self) -> None:
        self._path = TimelineLayout(self.folder).spans(self.rank)
        self._began_ns, self._began = self.spans.now(), read_clocks()

    def begin_step(self, step: int) -> None:
        """Write earlier steps if due, before step `step`."""
        over = step - 2  # device spans of the step before may not be known yet
        if over not in self.window or (over < self._due and over != self.window.last):
            return
        events = self.spans.events(self._next)
        self._write([e for e in events if e.step <= over and self._is_in(e.step)])
        self._next = over + 1
        a_step = sum(e.step == over for e in events)
        self._due = over + max(1, min(_MOST_TOGETHER, CAPACITY // 4 // max(1, a_step)))

    def close(self) -> None:
        """Write the rest of the window, and the last steps."""
        recent = self.spans.step - LAST_STEPS + 1
        kept = self.spans.events(min(self._next, recent))
        self._write([e for e in kept if e.step >= (self._next if self._is_in(e.step) else recent)])
        if self._file is not None:
            self._file.close()

    def _is_in(self, step: int) -> bool:
        return step == 0 or step in self.window

    def _write(self, events: list[Event]) -> None:
        if self._failed:
            return
        try:
            if self._file is None:
                self._file = TraceFile(free_path(self._path), list(self._head()))
            self._file.append(list(self._lines(events)))
        except OSError as error:
            self._failed = True
            self.warn(f"the trace {self._path} ends here: {error.strerror or error}; training continues")

    def _head(self) -> Iterator[dict[str, Any]]:
        yield self._line("process_name", "M", 0, args={"name": title(self.rank, self.host)})
        yield self._line("process_sort_index", "M", 0, args={"sort_index": self.rank})
        began_us = self._began_ns / 1e3
        epoch_us = round(self._began.epoch_us + began_us - self._began.monotonic_us)
        clock = SpanClock(epoch_us, began_us, clock_id(), self.start)
        yield self._line(CLOCK, "M", 0, args=msgspec.structs.asdict(clock))

    def _lines(self, events: list[Event]) -> Iterator[dict[str, Any]]:
        for event in events:
            if event.start_ns < self._began_ns:  # a garbage collection before training began
                continue
            label = self.spans.labels.get(event.track)
            if label is not None and label is not self._labels.get(event.track):
                self._labels[event.track] = label
                yield self._line(BUCKET, "M", event.track, args=label)
            if event.track not in self._tracks:
                self._tracks.add(event.track)
                names = {MAIN: "training thread", DEVICE: "device"}
                name = names.get(event.track, f"exchange of bucket {event.track - EXCHANGE}")
                yield self._line("thread_name", "M", event.track, args={"name": name})
            began_us, took_us = (event.start_ns - self._began_ns) / 1e3, (event.end_ns - event.start_ns) / 1e3
            yield self._line(event.name, "X", event.track, ts=began_us, dur=took_us, args={"step": event.step})

    def _line(self, name: str, phase: str, track: int, **rest: Any) -> dict[str, Any]:
        return {"name": name, "ph": phase, "pid": self.rank, "tid": track, **rest}
