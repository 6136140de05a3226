"""Builds the columns of a `HorovodTrace` from the text of a Timeline, a chunk at a time; large ones are on disk."""

from __future__ import annotations

import re
import tempfile
from collections import Counter, defaultdict
from itertools import count, pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from hvdtrain.timeline.columns import HorovodTrace
from hvdtrain.timeline.reading import events as trace_text
from hvdtrain.timeline.reading.events import Begin, End, Event, Mark, Metadata, Tick
from hvdtrain.timeline.wording import counted

_EXCERPT_BYTES = 40
_ONLY_ENDED = ("barrier.noname", "join.noname")
"""Horovod writes end events for these tensors but no begin events."""

SPAN = [("tensor", "i4"), ("phase", "i4"), ("start_us", "f8"), ("duration_us", "f8"), ("nbytes", "i8")]
TICK = [("tick_tensor", "i4"), ("tick_rank", "i4"), ("tick_us", "f8")]
"""Columns of a `HorovodTrace`."""

_LATEST_EPOCH_US = 1e18
_NEXT_TIMELINE = re.compile(rb'\[\n\{"name": "process_name", "ph": "M", "pid": [01],')
"""Where a Timeline begins. A file has several where Timelines were concatenated."""

_IGNORED = {
    "orphans": ("end event", "without a begin event ignored: begun before the trace"),
    "still_open": ("begin event", "without an end event ignored: still open"),
    "backwards": ("span", "ignored: the end is before the beginning"),
    "unnamed": ("tensor", "without a name: listed by number"),
}


def _rows(values: list[float], dtype: list[tuple[str, str]]) -> NDArray[Any]:
    """Return values, one row after the other, as rows with named columns."""
    return np.rec.fromarrays(np.array(values, float).reshape(-1, len(dtype)).T, dtype=dtype)


class _Tensors(dict[int, int]):
    """The tensors of a Timeline: the number in the trace by the number there.

    All tensors of the file, by number in the trace, are in `names`, `unnamed` (those without a name so far) and
    `still_open` (their operations that have not ended).
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.unnamed: set[int] = set()
        self.still_open: list[list[Begin]] = []

    def __missing__(self, pid: int) -> int:
        self.unnamed.add(len(self.names))
        return self._add(pid, f"tensor {pid}")

    def set_name(self, pid: int, name: str) -> None:
        """Name a tensor; if it has another name already, a new one begins."""
        number = self.get(pid, -1)
        if number in self.unnamed:
            self.unnamed.remove(number)
            self.names[number] = name
        elif number < 0 or self.names[number] != name:
            self._add(pid, name)

    def _add(self, pid: int, name: str) -> int:
        self[pid] = len(self.names)
        self.names.append(name)
        self.still_open.append([])
        return self[pid]


class TraceBuilder:
    """Collects the events of one file, and what cannot be read."""

    def __init__(self) -> None:
        self.size_bytes = 0  # of the text so far
        self.is_horovod = False  # one event is Horovod's
        self.is_foreign = False  # one event is another program's
        self.notes: list[str] = []  # sentences about what cannot be read
        self._ignored: Counter[str] = Counter()
        self._damaged_places = self._damaged_bytes = 0
        self._first_damage, self._damage_end = "", -1
        self._epoch_us: float | None = None
        self._shift_us = 0.0
        self._is_first = True
        self._tensors = _Tensors()
        self._phases = defaultdict[str, int](count().__next__)
        self._last_us = -np.inf
        self._in_order = True
        self._spans, self._ticks = Column(SPAN), Column(TICK)

    def add(self, chunk: bytes) -> None:
        """Add whole events."""
        if trace_text.NAME_HEAD not in chunk:
            self._add_text(chunk)
            return
        cuts = [0, *(found.start() for found in _NEXT_TIMELINE.finditer(chunk)), len(chunk)]
        for number, (begin, end) in enumerate(pairwise(cuts)):
            text = chunk[begin:end]
            if number and self.is_horovod:  # with its own clock and tensor numbers
                self._is_first = False
                self._shift_us = 0.0
                self._tensors.clear()
            plain = bytearray(text)
            for found in trace_text.NAME.finditer(text):
                self._tensors.set_name(int(found[1]), found[2].decode("utf-8", "replace"))
                plain[found.start() : found.end()] = b" " * len(found[0])
            self._add_text(bytes(plain))

    def finish(self, path: Path) -> HorovodTrace:
        """Return the columns."""
        self._ignored["still_open"] = sum(map(len, self._tensors.still_open))
        self._ignored["unnamed"] = len(self._tensors.unnamed)
        spans, ticks = self._spans.finish(), self._ticks.finish()
        if not self._in_order:
            spans = spans[np.argsort(spans["start_us"] + spans["duration_us"], kind="stable")]
        return HorovodTrace(
            path=path,
            epoch_us=self._epoch_us,
            tensors=self._tensors.names,
            phases=list(self._phases),
            **{name: spans[name] for name, _ in SPAN},
            **{name: ticks[name] for name, _ in TICK},
            dropped=self._dropped(),
        )

    def _dropped(self) -> list[str]:
        """Return a sentence for each kind of damage; none if everything was read."""
        lines = list(self.notes)
        is_truncated = self._damage_end == self.size_bytes
        if inside := self._damaged_places - is_truncated:
            size = f"({self._damaged_bytes} bytes)"
            lines.append(f"{counted(inside, 'damaged place')} skipped {size}, first {self._first_damage}")
        if is_truncated:
            lines.append("the file ends in the middle of an event, as after a killed job")
        ignored = ((self._ignored[kind], *words) for kind, words in _IGNORED.items())
        return lines + [f"{counted(number, noun)} {what}" for number, noun, what in ignored if number]

    def _add_text(self, text: bytes) -> None:
        events = trace_text.decode(text)
        if events is None:
            events = []
            for begin, end, fields in trace_text.salvage(text):
                if (event := trace_text.as_event(fields)) is None:
                    self.is_foreign |= "tid" in fields or "cat" in fields
                    self._skip(self.size_bytes + begin, text[begin:end])
                else:
                    events.append(event)
        self._add_events(events)
        self.size_bytes += len(text)

    def _skip(self, offset: int, text: bytes) -> None:
        """Count bytes without an event of Horovod; adjacent ones are one place."""
        if not self._damaged_places:
            self._first_damage = f"byte {offset}, {text[:_EXCERPT_BYTES].decode('utf-8', 'replace')!r}"
        self._damaged_places += offset != self._damage_end
        self._damaged_bytes += len(text)
        self._damage_end = offset + len(text)

    def _add_events(self, events: list[Event]) -> None:
        """Pair begin and end events of each tensor by a stack, and add the pairs to the columns."""
        phases, tensors, still_open = self._phases, self._tensors, self._tensors.still_open
        spans: list[float] = []
        ticks: list[float] = []
        for event in events:
            if type(event) is Begin:  # isinstance is slower on these classes, which have a metaclass
                still_open[tensors[event.pid]].append(event)
            elif type(event) is End:
                number = tensors[event.pid]
                if still_open[number]:
                    begin = still_open[number].pop()
                    size = -1 if event.args is None else trace_text.nbytes(event.args)
                    spans += number, phases[begin.name], begin.ts, event.ts - begin.ts, size
                else:
                    self._ignored["orphans"] += tensors.names[number] not in _ONLY_ENDED
            elif type(event) is Tick:
                ticks += tensors[event.pid], int(event.name), event.ts
            elif type(event) is Metadata:
                self._add_metadata(event)
        self.is_horovod |= bool(tensors.names) or any(type(event) is Mark for event in events)
        rows = _rows(ticks, TICK)
        rows["tick_us"] += self._shift_us
        self._ticks.add(rows)
        rows = _rows(spans, SPAN)
        forward = rows["duration_us"] >= 0
        self._ignored["backwards"] += int(np.sum(~forward))
        rows = rows[forward]
        rows["start_us"] += self._shift_us
        self._spans.add(rows)
        if len(rows):
            ends_us = rows["start_us"] + rows["duration_us"]
            self._in_order &= bool(np.all(np.diff(ends_us, prepend=self._last_us) >= 0))
            self._last_us = ends_us[-1]

    def _add_metadata(self, event: Metadata) -> None:
        if event.name != "process_name":
            return
        epoch_us, tensor = event.args.get("start_time_since_epoch_in_micros"), event.args.get("name")
        if event.pid == 0 and isinstance(epoch_us, float) and abs(epoch_us) < _LATEST_EPOCH_US:
            self.is_horovod = True
            if self._is_first:
                self._epoch_us = epoch_us
            elif self._epoch_us is not None:
                self._shift_us = epoch_us - self._epoch_us
        elif isinstance(tensor, str):
            self._tensors.set_name(event.pid, tensor)


class Column:
    """A column to which arrays are added; one larger than `in_memory_bytes` is written to disk."""

    def __init__(self, dtype: DTypeLike, in_memory_bytes: int = 1 << 23) -> None:
        self._dtype = np.dtype(dtype)
        self._limit = in_memory_bytes
        self._in_memory = bytearray()
        self._file: IO[bytes] | None = None

    def add(self, values: NDArray[Any]) -> None:
        """Append a copy of `values`."""
        self._in_memory += values.astype(self._dtype).tobytes()
        if len(self._in_memory) > self._limit:
            self._spill()

    def finish(self) -> NDArray[Any]:
        """Return the whole column: an array in memory, or one that maps the file."""
        if self._file is not None:
            self._spill()
            with self._file:
                if not self._in_memory:
                    mapped: NDArray[Any] = np.memmap(self._file, self._dtype, mode="c")
                    return mapped.view(np.ndarray)
                self._file.seek(0)  # the disk is full
                self._in_memory[:0] = self._file.read()
        return np.frombuffer(self._in_memory, self._dtype)

    def _spill(self) -> None:
        """Move the bytes in memory to disk; they stay in memory if the disk is full."""
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="hvdtrain-", buffering=0)  # noqa: SIM115 - until `finish`
            while self._in_memory:
                del self._in_memory[: self._file.write(self._in_memory)]
        except OSError:
            self._limit = 1 << 62
