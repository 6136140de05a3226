"""Read a `journal.jsonl`: its lines, steps, events, starts and ends. A line that a kill cut off is skipped."""

from __future__ import annotations

import math
import os
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any

import msgspec
import orjson

from hvdtrain.files import GrowingFile, open_regular

FIRST_TIMES = 32

ENDINGS = ("finished", "stopped", "failed")
"""Events that end a start."""

AFTER_END = ("warning", "machine", "energy", "explained")
"""Events that may follow the end of a run."""

_STEP, _EVALUATION = b'{"step":', b'{"event":"evaluation"'
"""First bytes of the line of a step, and of an evaluation."""


def journal_lines(path: str | Path, offset: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the steps and events of a journal in order, from an offset on; `damaged_lines` are left out."""
    with open_regular(Path(path)) as file:
        file.seek(offset)
        for line in file:
            with suppress(ValueError):
                if _is_known(record := orjson.loads(line)):
                    yield record


def _is_known(record: Any) -> bool:
    return isinstance(record, dict) and ("event" in record or "step" in record)


def read_steps(path: str | Path) -> dict[int, dict[str, Any]]:
    """Return the steps of a journal by number. The last line counts for a step that ran again after a resume."""
    return {line["step"]: line for line in journal_lines(path) if "event" not in line}


def last_step(path: Path) -> int:
    """Return the number of the step that was written last, or 0. Reads only the end of the file."""
    for line in reversed(_tail(path)):
        with suppress(ValueError):
            record = orjson.loads(line)
            if _is_known(record) and "event" not in record:
                return int(record["step"])
    return 0


def is_finished(path: Path) -> bool:
    """Return whether the run reached its end and did not resume since. Reads only the end of the file."""
    for line in reversed(_tail(path)):
        try:
            event = orjson.loads(line).get("event")
        except (ValueError, AttributeError):
            return False
        if event not in AFTER_END:
            return bool(event == "finished")
    return False


def damaged_lines(path: Path) -> list[int]:
    """Return the numbers, from 1, of lines that are neither a step nor an event; none if there is no journal.

    It leaves out a line that a kill cut off: the beginning of a record, which is last or before an event.
    """
    damaged: list[int] = []
    if not path.is_file():
        return damaged
    cut = 0
    with open_regular(path) as file:
        for number, line in enumerate(file, 1):
            record: Any = None
            with suppress(ValueError):
                record = orjson.loads(line)
            is_event = isinstance(record, dict) and "event" in record
            if cut and not is_event:
                damaged.append(cut)
            cut = number if record is None and line.startswith(b"{") else 0
            if not cut and not _is_known(record):
                damaged.append(number)
    return damaged


@dataclass
class JournalStart:
    """A start of a run in its journal."""

    started: Mapping[str, Any]  # the event `started`; empty for lines before the first
    first_step: int | None = None
    last_step: int = -1  # number of its last step; -1 before
    last_time: float = 0.0  # time of its end, or of its last line, in seconds since 1970; 0 if unknown
    events: list[dict[str, Any]] = field(default_factory=list)
    steps: array[int] = field(default_factory=lambda: array("q"))  # in the order of lines; a repeated step has several
    seconds: array[float] = field(default_factory=lambda: array("d"))  # of each of these; 0 if unknown
    offsets: array[int] = field(default_factory=lambda: array("q"))  # of their lines, in bytes
    skipped: list[int] = field(default_factory=list)  # places in `steps` of those that changed nothing
    first_times: list[float] = field(default_factory=list)  # of the first `FIRST_TIMES` lines, since 1970; 0 if unknown
    last_step_time: float = 0.0  # of the last of these lines

    def events_named(self, name: str) -> list[dict[str, Any]]:
        """Return the events of a name."""
        return [event for event in self.events if event["event"] == name]


class _Line(msgspec.Struct):
    """What a line says about its start. Others may have written it: any field may be of any type."""

    event: Any = msgspec.UNSET
    step: Any = None
    step_s: Any = None
    time: Any = None
    skipped: Any = False


_decode_line = msgspec.json.Decoder(_Line).decode


def read_journal_starts(path: Path) -> list[JournalStart]:
    """Return the starts in a journal; none if there is no journal. A million steps take about a second."""
    return JournalReader(path).read(whole=False)


class JournalReader:
    """Reads a journal, and later only the lines that were added since."""

    def __init__(self, path: Path) -> None:
        self._file = GrowingFile(path)
        self._starts: list[JournalStart] = []

    def read(self, *, whole: bool = True) -> list[JournalStart]:
        """Return the starts up to now, which later calls change. `whole`: the last line must have ended."""
        if not self._file.path.is_file():
            return []
        if self._file.begins_again():
            self._starts = []
        for text in self._file.new_lines(whole=whole):
            self._add(text)
        return self._starts

    def _add(self, text: bytes) -> None:
        try:
            line = _decode_line(text)
            is_step = line.event is msgspec.UNSET and isinstance(line.step, int) and line.step < 1 << 60
            event = orjson.loads(text) if line.event is not msgspec.UNSET else {}
        except ValueError:
            return
        if not is_step and not event:
            return
        if line.event == "started" or not self._starts:
            self._starts.append(JournalStart(event if line.event == "started" else {}))
        start = self._starts[-1]
        if line.event not in AFTER_END or not any(each["event"] in ENDINGS for each in start.events[-len(AFTER_END) :]):
            start.last_time = _number(line.time)
        if is_step:
            start.first_step = line.step if start.first_step is None else start.first_step
            start.last_step, start.last_step_time = line.step, start.last_time
            if line.skipped is True:
                start.skipped.append(len(start.steps))
            start.steps.append(line.step)
            start.seconds.append(max(0.0, _number(line.step_s)))
            start.offsets.append(self._file.offset - len(text))
            if len(start.first_times) < FIRST_TIMES:
                start.first_times.append(start.last_time)
        elif line.event != "started":
            start.events.append(event)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


def is_chosen(number: int, every: int) -> bool:
    """Return whether a number from 0 on is in a sample: one of each `every` consecutive ones, at a hashed place.

    No period of the sequence can avoid such a sample. It is equal on all ranks.
    """
    stretch, place = divmod(number, every)
    return zlib.crc32(stretch.to_bytes(8, "little")) % every == place


def sampled_steps(
    path: Path, start: JournalStart, most: int, known: Mapping[int, dict[str, Any]] | None = None
) -> dict[int, dict[str, Any]]:
    """Return the steps of a start by the offset of their line; of more than `most`, about as many, evenly spread.

    Those that are `known` from an earlier call are not read again.
    """
    known, every = known or {}, max(1, -(-len(start.offsets) // most))
    found = {}
    with open_regular(path) as file:
        for offset in compress(start.offsets, (is_chosen(place, every) for place in range(len(start.offsets)))):
            if offset in known:
                found[offset] = known[offset]
                continue
            file.seek(offset)
            with suppress(ValueError):
                if isinstance(record := orjson.loads(file.readline()), dict):
                    found[offset] = record
    return found


def skipped_steps(starts: Iterable[JournalStart]) -> set[int]:
    """Return the steps that changed nothing. The last line counts for a step that ran again after a resume."""
    found: set[int] = set()
    for start in starts:
        skipped = set(start.skipped)
        for place, step in enumerate(start.steps):
            (found.add if place in skipped else found.discard)(step)
    return found


def read_events(path: Path, name: str) -> list[dict[str, Any]]:
    """Return the events of a name from all starts."""
    return [event for start in read_journal_starts(path) for event in start.events_named(name)]


def _tail(path: Path) -> list[bytes]:
    """Return the last lines. The first of them may be incomplete."""
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - 65536))
        return file.read().splitlines()


class PastSteps:
    """The steps of a journal. The last line counts for a step that ran again after a resume.

    A missing journal has no steps.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.seconds = array("d", [0.0])  # by step, seconds of training up to its end; 0.0 at step 0
        self.positions = array("q", [0])  # by step, samples consumed up to its end
        self.losses = array("d", [math.nan])  # by step; nan where it was not finite, and at steps that another run did
        self.evaluations: dict[int, dict[str, Any]] = {}  # the events by step, of steps that count
        self._offsets = array("q", [0])

    def read(self) -> PastSteps:
        """Read the journal, and return this object."""
        offset = 0
        if self._path.exists():
            with self._path.open("rb") as lines:
                for line in lines:
                    if line.startswith(_STEP):
                        with suppress(ValueError):
                            self._add(orjson.loads(line), offset)
                    elif line.startswith(_EVALUATION):
                        with suppress(ValueError):
                            event = orjson.loads(line)
                            self.evaluations[event["at_step"]] = event
                    offset += len(line)
        return self

    def _add(self, record: Mapping[str, Any], offset: int) -> None:
        step, loss = record["step"], record.get("loss")
        columns: tuple[array[Any], ...] = (self.seconds, self.positions, self._offsets, self.losses)
        for column in columns:
            del column[step:]
        # Steps are missing if the run began from another run's state.
        missing = (self.seconds[-1], self.positions[-1], self._offsets[-1], math.nan)
        seconds = self.seconds[-1] + record["step_s"]
        values = (seconds, record["position"], offset, math.nan if loss is None else loss)
        for column, unknown, value in zip(columns, missing, values, strict=True):
            column.extend([unknown] * (step - len(column)))
            column.append(value)
        while self.evaluations and (last := next(reversed(self.evaluations))) >= step:
            del self.evaluations[last]

    def __contains__(self, step: int) -> bool:
        return 0 <= step < len(self.seconds)

    def step_before(self, step: int, since_s: float) -> int:
        """Return the last step that ended more than `since_s` seconds of training before `step` ended.

        It ignores the times of the lines, because a clock may have been set between two starts.
        """
        return max(0, bisect_left(self.seconds, self.seconds[step] - since_s) - 1)

    def records_after(self, first: int, last: int) -> list[dict[str, Any]]:
        """Return steps after `first` up to `last`, in order, with their events; if `first` is 0, also those of 0."""
        found: dict[tuple[int, str], dict[str, Any]] = {}
        for record in journal_lines(self._path, self._offsets[first]):
            step = record.get("at_step") if "event" in record else record["step"]
            if step is not None and (first < step or first == 0) and step <= last:
                found[step, record.get("event", "")] = record  # an event follows its step
        return [found[key] for key in sorted(found)]
