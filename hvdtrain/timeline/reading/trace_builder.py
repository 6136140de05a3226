"""Builds the columns of a `HorovodTrace` from the text of a Timeline, a chunk at a time."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.timeline.columns import HorovodTrace
from hvdtrain.timeline.reading.damage import Damage
from hvdtrain.timeline.reading.events import (
    LONGEST_BYTES,
    Begin,
    End,
    Event,
    Metadata,
    Tick,
    as_event,
    decode,
    find_names,
    is_foreign,
    nbytes,
)
from hvdtrain.timeline.reading.growing import Column
from hvdtrain.timeline.reading.salvage import salvage

_BEGINNING_BYTES = 256
_SALVAGE_BYTES = 1 << 14
"""Damaged text up to this size is searched object by object; larger text is split first."""

_ONLY_ENDED = ("barrier.noname", "join.noname")
"""Horovod writes end events for these tensors but no begin events."""

_SPANS = {"tensor": "i4", "phase": "i2", "start_us": "f8", "duration_us": "f8", "nbytes": "i8"}
_TICKS = {"tick_tensor": "i4", "tick_rank": "i4", "tick_us": "f8"}
_LATEST_EPOCH_US = 1e18
_BETWEEN_EVENTS = re.compile(rb"\}\s*,\s*(?=\{)")


def last_boundary(text: bytes, end: int) -> int:
    """Return where the last event before `end` begins; 0 if there is none near it."""
    last = 0
    for found in _BETWEEN_EVENTS.finditer(text, max(0, end - 2 * LONGEST_BYTES), end):
        last = found.end()
    return last


class _Tensors(dict[int, tuple[int, list[Begin]]]):
    """The tensors of a Timeline: by the number there, the number in the trace and the operations still open.

    `names` and `unnamed` (those without a name so far) are of all tensors of the file, by number in the trace.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.unnamed: set[int] = set()

    def __missing__(self, pid: int) -> tuple[int, list[Begin]]:
        self.unnamed.add(len(self.names))
        return self._add(pid, f"tensor {pid}")

    def set_name(self, pid: int, name: str) -> int:
        """Name a tensor; if it has another name already, a new one begins. Return how many operations that ends."""
        number, still_open = self.get(pid, (-1, []))
        if number in self.unnamed:
            self.unnamed.remove(number)
            self.names[number] = name
        elif number < 0 or self.names[number] != name:
            self._add(pid, name)
            return len(still_open)
        return 0

    def _add(self, pid: int, name: str) -> tuple[int, list[Begin]]:
        tensor = self[pid] = (len(self.names), [])
        self.names.append(name)
        return tensor


class TraceBuilder:
    """Collects the events of one file, its first bytes, whether one event is Horovod's, and what cannot be read."""

    def __init__(self) -> None:
        self.is_horovod = False
        self.beginning = b""
        self.damage = Damage()
        self._epoch_us: float | None = None
        self._shift_us = 0.0
        self._is_first = True
        self._tensors = _Tensors()
        self._phases = defaultdict[str, int](count().__next__)
        self._orphans: Counter[int] = Counter()
        self._last_us = -np.inf
        self._in_order = True
        self._spans = {name: Column(dtype) for name, dtype in _SPANS.items()}
        self._ticks = {name: Column(dtype) for name, dtype in _TICKS.items()}

    def start_timeline(self) -> None:
        """Begin another Timeline of the same file, with its own clock and tensor numbers."""
        if not self.is_horovod:
            return
        self._is_first = False
        self._shift_us = 0.0
        self.damage.still_open += sum(len(still_open) for _, still_open in self._tensors.values())
        self._tensors.clear()

    def add(self, text: bytes, offset: int) -> None:
        """Add whole events, which begin at byte `offset` of the file."""
        self._remember_beginning(text)
        plain = bytearray(text)
        for begin, end, pid, name in find_names(text):
            self._set_name(pid, name)
            plain[begin:end] = b" " * (end - begin)
        self._add_events(bytes(plain), offset)

    def add_damaged(self, text: bytes, offset: int) -> int:
        """Add text in which no event seems to end; return how many bytes were used."""
        used = self._salvage(text, offset, final=False)
        self._remember_beginning(text[:used])
        return used

    def finish(self, path: Path, file_bytes: int) -> HorovodTrace:
        """Return the columns."""
        self.start_timeline()
        names = self._tensors.names
        self.damage.orphans = sum(n for number, n in self._orphans.items() if names[number] not in _ONLY_ENDED)
        self.damage.unnamed = len(self._tensors.unnamed)
        spans = {name: column.finish() for name, column in self._spans.items()}
        if not self._in_order:
            order = np.argsort(spans["start_us"] + spans["duration_us"], kind="stable")
            spans = {name: column[order] for name, column in spans.items()}
        ticks = {name: column.finish() for name, column in self._ticks.items()}
        return HorovodTrace(
            path=path,
            epoch_us=self._epoch_us,
            tensors=names,
            phases=list(self._phases),
            **spans,
            **ticks,
            dropped=self.damage.lines(file_bytes),
        )

    def _remember_beginning(self, text: bytes) -> None:
        self.beginning += text[: max(0, _BEGINNING_BYTES - len(self.beginning))]

    def _add_events(self, text: bytes, offset: int) -> None:
        events = decode(text)
        if events is not None:
            self._add_columns(events)
        elif len(text) > _SALVAGE_BYTES and (middle := last_boundary(text, len(text) // 2)):
            self._add_events(text[:middle], offset)
            self._add_events(text[middle:], offset + middle)
        else:
            self._salvage(text, offset, final=True)

    def _salvage(self, text: bytes, offset: int, *, final: bool) -> int:
        pieces, used = salvage(text, final=final)
        events = []
        for piece in pieces:
            event = as_event(piece.event) if piece.event else None
            if event is None:
                self.damage.foreign += piece.event is not None and is_foreign(piece.event)
                self.damage.skip(offset + piece.offset, text[piece.offset : piece.end])
            else:
                events.append(event)
        self._add_columns(events)
        return used

    def _add_columns(self, events: list[Event]) -> None:
        """Pair begin and end events of each tensor by a stack, and add the pairs to the columns."""
        phases, tensors = self._phases, self._tensors
        spans: tuple[list[Any], ...] = ([], [], [], [], [])
        add_tensor, add_phase, add_start, add_duration, add_nbytes = (column.append for column in spans)
        ticks: tuple[list[Any], ...] = ([], [], [])
        add_tick_tensor, add_rank, add_tick = (column.append for column in ticks)
        for event in events:
            if type(event) is Begin:  # isinstance is slower on these classes, which have a metaclass
                tensors[event.pid][1].append(event)
            elif type(event) is End:
                number, still_open = tensors[event.pid]
                if still_open:
                    begin = still_open.pop()
                    add_tensor(number)
                    add_phase(phases[begin.name])
                    add_start(begin.ts)
                    add_duration(event.ts - begin.ts)
                    add_nbytes(-1 if event.args is None else nbytes(event.args))
                else:
                    self._orphans[number] += 1
            elif type(event) is Tick:
                add_tick_tensor(tensors[event.pid][0])
                add_rank(int(event.name))
                add_tick(event.ts)
            elif type(event) is Metadata:
                self._add_metadata(event)
        self.is_horovod |= any(type(event) is not Metadata for event in events)
        self._add_arrays([np.array(column) for column in spans], [np.array(column) for column in ticks])

    def _add_arrays(self, spans: list[NDArray[Any]], ticks: list[NDArray[Any]]) -> None:
        """Add spans (tensor, phase, start, duration, bytes) and ticks (tensor, rank, time) by the Timeline's clock."""
        tick_tensor, rank, tick_us = ticks
        for column, values in zip(self._ticks.values(), (tick_tensor, rank, tick_us + self._shift_us), strict=True):
            column.add(values)
        is_forward = spans[3] >= 0
        self.damage.backwards += int(np.sum(~is_forward))
        tensor, phase, start_us, duration_us, sizes = (values[is_forward] for values in spans)
        start_us = start_us + self._shift_us
        for column, values in zip(self._spans.values(), (tensor, phase, start_us, duration_us, sizes), strict=True):
            column.add(values)
        if len(start_us):
            ends_us = start_us + duration_us
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
            self._set_name(event.pid, tensor)

    def _set_name(self, pid: int, name: str) -> None:
        self.is_horovod = True
        self.damage.still_open += self._tensors.set_name(pid, name)
