"""What chunks of a Timeline add up to."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.timeline.columns import HorovodTrace
from hvdtrain.timeline.reading import salvage
from hvdtrain.timeline.reading.begin_end import Ends, Pairs
from hvdtrain.timeline.reading.damage import Damage
from hvdtrain.timeline.reading.events import Found, Metadata, as_found
from hvdtrain.timeline.reading.growing import Column
from hvdtrain.timeline.reading.tensor_names import MOST, Tensors, find_named
from hvdtrain.timeline.reading.tensor_sizes import Sizes
from hvdtrain.timeline.reading.words import PAD, Words
from hvdtrain.timeline.reading.written import Events, Names, find_events

_BEGINNING_BYTES = 256
_ONLY_ENDED = ("barrier.noname", "join.noname")
"""What these carry out is never begun, only ended."""

_SPANS = {"tensor": "i4", "phase": "i2", "start_us": "f8", "duration_us": "f8", "nbytes": "i8"}
_TICKS = {"tick_tensor": "i4", "tick_rank": "i4", "tick_us": "f8"}


class Intake:
    """Takes in the chunks of one file, in their order.

    Attributes:
        is_horovod: whether anything of Horovod was seen.
        beginning: the file's first bytes.
        damage: what could not be read.
    """

    def __init__(self) -> None:
        self.is_horovod = False
        self.beginning = b""
        self.damage = Damage()
        self._epoch_us: float | None = None
        self._shift_us = 0.0
        self._part = 0
        self._tensors, self._phases, self._sizes = Tensors(), Names(), Sizes()
        self._pairs = Pairs()
        self._last_us = -np.inf
        self._in_order = True
        self._spans = {name: Column(dtype) for name, dtype in _SPANS.items()}
        self._ticks = {name: Column(dtype) for name, dtype in _TICKS.items()}

    def begin_another(self) -> None:
        """Another Timeline begins here, with its own clock and its own numbers of tensors."""
        self._part += 1
        self._shift_us = 0.0
        self.damage.still_open += self._pairs.still_open
        self._pairs.clear()
        self._tensors.clear()

    def add(self, text: memoryview, offset: int, *, final: bool) -> int:
        """Take in a part of the file that stands at `offset`; how many bytes of it, all where `final`."""
        words = self._without_names(Words(text))
        events = find_events(words, self._phases, self._sizes)
        events = events.take(np.flatnonzero(events.pid < MOST))
        more, taken = self._between(words, events, offset, final=final)
        if more:
            events = _merge(events, more)
        self._take(events)
        self.beginning += bytes(text[: min(taken, _BEGINNING_BYTES - len(self.beginning))])
        return taken

    def _without_names(self, words: Words) -> Words:
        """Take in tensors' names, which may look like events, and put blanks in their place."""
        named = list(find_named(words.text))
        if not named:
            return words
        self.is_horovod = True
        plain = bytearray(words.text)
        for begin, end, pid, name in named:
            self._tensors.name(pid, name)
            plain[begin:end] = b" " * (end - begin)
        return Words(memoryview(plain)[PAD:-PAD])

    def finish(self, path: Path, file_bytes: int) -> HorovodTrace:
        """What the file holds."""
        damage = self.damage
        damage.still_open += self._pairs.still_open
        orphans = {self._tensors.names[tensor]: count for tensor, count in self._pairs.orphans.items()}
        damage.orphans = sum(count for name, count in orphans.items() if name not in _ONLY_ENDED)
        damage.unnamed = self._tensors.unnamed
        spans = {name: column.finish() for name, column in self._spans.items()}
        if not self._in_order:
            order = np.argsort(spans["start_us"] + spans["duration_us"], kind="stable")
            spans = {name: column[order] for name, column in spans.items()}
        ticks = {name: column.finish() for name, column in self._ticks.items()}
        return HorovodTrace(
            path=path,
            epoch_us=self._epoch_us,
            tensors=self._tensors.names,
            phases=self._phases.names,
            **spans,
            **ticks,
            dropped=damage.lines(file_bytes),
        )

    def _between(self, words: Words, events: Events, offset: int, *, final: bool) -> tuple[list[Found], int]:
        """What stands between events of Horovod's form, and up to where it was read."""
        begins, ends = np.append(0, events.end), np.append(events.offset, words.size)
        gaps = ends - begins
        usual = (gaps == 1) | ((gaps == 2) & (words.bytes[np.maximum(ends - 1, 0)] == ord("\n")))
        usual &= words.bytes[begins] == ord(",")
        found: list[Found] = []
        taken = words.size
        for at in np.flatnonzero(~usual).tolist():
            begin, last = int(begins[at]), at == len(events.end)
            text = words.cut(begin, int(ends[at]))
            pieces, length = salvage.salvage(text, final=final or not last)
            if last:
                taken = begin + length
            for piece in pieces:
                event = piece.event and as_found(piece.event, begin + piece.offset, begin + piece.end, self._phases)
                self._judge(event, text[piece.offset : piece.end], offset + begin + piece.offset, found)
        return found, taken

    def _judge(self, event: object, text: bytes, offset: int, found: list[Found]) -> None:
        """Take what stood at `offset` for what it is."""
        if isinstance(event, Found):
            found.append(event)
        elif isinstance(event, Metadata):
            if event.epoch_us is not None:
                self._set_clock(event.epoch_us)
            elif event.name is not None:
                self._tensors.name(event.pid, event.name)
                self.is_horovod = True
        else:
            self.damage.foreign += event == "foreign"
            self.damage.pass_over(offset, text)

    def _set_clock(self, epoch_us: float) -> None:
        self.is_horovod = True
        if not self._part:
            self._epoch_us = epoch_us
        elif self._epoch_us is not None:
            self._shift_us = epoch_us - self._epoch_us

    def _take(self, events: Events) -> None:
        """Add events to the columns."""
        if not len(events.ts):
            return
        self.is_horovod = True
        ticks = np.flatnonzero(events.kind == ord("X"))
        spans = np.flatnonzero((events.kind == ord("B")) | (events.kind == ord("E")))
        us = events.ts + self._shift_us
        columns: tuple[NDArray[Any], ...] = (self._tensors.find(events.pid[ticks]), events.name[ticks], us[ticks])
        for column, values in zip(self._ticks.values(), columns, strict=True):
            column.add(values)
        tensor = self._tensors.find(events.pid[spans])
        begins = events.kind[spans] == ord("B")
        given, (begin, end) = self._pairs.add(Ends(begins, tensor, events.name[spans], us[spans], events.nbytes[spans]))
        duration = given.ts[end] - given.ts[begin]
        if (backwards := duration < 0).any():
            self.damage.backwards += int(backwards.sum())
            begin, end, duration = begin[~backwards], end[~backwards], duration[~backwards]
        columns = (given.tensor[end], given.phase[begin], given.ts[begin], duration, given.nbytes[end])
        for column, values in zip(self._spans.values(), columns, strict=True):
            column.add(values)
        ended = given.ts[end]
        self._in_order &= bool(np.all(np.diff(ended, prepend=self._last_us) >= 0))
        self._last_us = ended[-1] if len(ended) else self._last_us


def _merge(events: Events, found: list[Found]) -> Events:
    """Both, in the order of the file."""
    rows = [(f.offset, f.end, f.kind, f.ts, f.pid, f.name, f.nbytes) for f in found]
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    names = [field.name for field in fields(Events)]
    both = [np.concatenate([getattr(events, name), column]) for name, column in zip(names, columns, strict=True)]
    return Events(*both).take(np.argsort(both[0], kind="stable"))
