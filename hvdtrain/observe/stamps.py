"""Step stamps: when a step of a rank began, was ready, was released and ended, and its parts.

They are gathered in blocks of consecutive steps, one tensor for each rank; rank 0 writes ``RUN/timeline/steps.jsonl``.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hvdtrain.errors import RunDirectoryError
from hvdtrain.observe.clocks import Clocks
from hvdtrain.observe.host_load import ASIDE, CAUSES, throttle_text
from hvdtrain.observe.journal import LineFile
from hvdtrain.observe.past_journal import is_chosen, journal_lines
from hvdtrain.observe.step_format import BlockLine, ClockLine, Offset, StartLine
from hvdtrain.spans import APART, DEVICE, JOURNAL_KEYS, NESTED, PARTS, RawEvent

MOMENTS = ("start", "ready", "released", "end", "sent", "received")
"""Points in time. Sent and received bound clock offsets: no rank receives before all ranks have sent."""

DURATIONS = (*PARTS, "gc")
"""Sums over a step. gc overlaps the others."""

COLUMNS = (*MOMENTS, *DURATIONS)
_WRITTEN = MOMENTS[:4]
_START, _READY, _RELEASED, _END, _SENT, _RECEIVED = range(len(MOMENTS))
_AT = {name: len(MOMENTS) + number for number, name in enumerate(DURATIONS)}

BLOCK = 16
"""Steps per block."""

FACTS = (*CAUSES, "expert_share")
"""Figures of a block."""

_HEAD = 3
_ROWS_AT = _HEAD + len(FACTS) + BLOCK
_LENGTH = _ROWS_AT + BLOCK * len(COLUMNS)
_DENSE = 256
_DENSE_AT_LEAST = 4
_EVEN, _EVEN_AT_LEAST, _EVEN_STAMPS = 128, 16, 16384


def is_gathered(block: int, size: int, steps: int = 0) -> bool:
    """Return whether the stamps of a block are gathered; equal on all ranks. Blocks count from a start's first step.

    Of a start of `steps` steps, if that is known, ``e = min(128, max(16, 16384 // size))`` blocks are, one of each e-th
    of it, so that a change at any time is seen. In addition, because a start may end early, all of the first ``d =
    max(4, 256 // size)`` blocks are, one of two up to ``2 d``, one of four up to ``4 d``, and so on: ``d + d/2
    log2(n/d)`` of n blocks. Their places are hashed, so that what recurs is not always missed. At about 2 KB per rank
    and block, a million steps take 5 MB for 1 rank, 6 for 8, 8 for 64; the evenly spread ones take 16 MB for 64 ranks,
    and 32 MB for 128 to 1024.
    """
    even = min(_EVEN, max(_EVEN_AT_LEAST, _EVEN_STAMPS // size))
    if steps and is_chosen(block, max(1, steps // (BLOCK * even))):
        return True
    dense = max(_DENSE_AT_LEAST, _DENSE // size)
    return is_chosen(block, 1 << (block // dense).bit_length())


def step_rows(events: Iterable[RawEvent], first: int, count: int) -> list[list[float]]:
    """Return stamps of steps, nanoseconds [count, len(COLUMNS)] by the recorder's clock; NaN if unknown.

    Spans of the device replace those of the host, except for sent and received. A rank without samples sends when the
    step begins. Moments are those of the last wait; after `APART` alone, nothing was received.

    `events` are the spans of these `count` steps from `first` on, and of the step before.
    """
    host = [[math.nan] * len(MOMENTS) + [0.0] * len(DURATIONS) for _ in range(count)]
    device: dict[int, list[float]] = {}
    nested: list[tuple[int, int]] = []  # starts and durations of spans inside of one that has not ended
    for name, track, start_ns, end_ns, step in events:
        if track > DEVICE:
            continue
        number = step + (name in ASIDE) - first
        if not 0 <= number < count:
            continue
        row = host[number]
        if name in ASIDE:
            row[_AT["aside"]] += end_ns - start_ns
            continue
        if track == DEVICE:
            row = device.setdefault(number, [math.nan] * len(MOMENTS) + [0.0] * len(DURATIONS))
        if name in _AT:
            row[_AT[name]] += end_ns - start_ns
            if name in NESTED:
                nested.append((start_ns, end_ns - start_ns))
            elif nested and track != DEVICE and name in JOURNAL_KEYS:
                row[_AT[name]] -= sum(duration for start, duration in nested if start >= start_ns)
                nested = []
            if name == "backward":
                row[_SENT] = end_ns
            elif name == "wait":
                row[_READY], row[_RELEASED], row[_RECEIVED] = start_ns, end_ns, end_ns
        elif name == APART:
            row[_RECEIVED] = math.nan
        elif name == "step":
            row[_START], row[_END] = start_ns, end_ns
    for number, row in device.items():
        for column, its in enumerate(row):
            if its and not math.isnan(its) and column not in (_SENT, _RECEIVED):
                host[number][column] = its
    for row in host:
        if row[_SENT] != row[_SENT]:
            row[_SENT] = row[_START]
    return host


class Block(NamedTuple):
    """The stamps of consecutive steps of all ranks."""

    first: int
    stamps: NDArray[np.float64]  # microseconds of `COLUMNS`, by each rank's own clock [ranks, steps, columns]
    facts: dict[str, list[float]]  # those of `FACTS` that any rank knows, a number per rank, NaN if unknown
    elements: NDArray[np.float64]  # of each rank's batches, in the largest tensor of each; 0 if unknown [ranks, steps]


def pack(
    first: int, count: int, probe_clocks: bool, facts: Sequence[float], rows: Sequence[Any], sizes: Mapping[int, int]
) -> Tensor:
    """Return one rank's message: float64 [1, length], of the same length for each block.

    `facts` are `FACTS`; `rows` are nanoseconds [BLOCK, columns], by `COLUMNS`, of the `count` steps from `first` on.
    `sizes` are the elements of batches by step. With `probe_clocks`, rank 0 requests a comparison of clocks.
    """
    elements = [sizes.get(step, 0) for step in range(first, first + BLOCK)]
    values = [first, count, float(probe_clocks), *facts, *elements, *chain.from_iterable(rows)]
    assert len(values) == _LENGTH, len(values)
    return torch.frombuffer(array("d", values), dtype=torch.float64).unsqueeze(0)


def unpack(messages: NDArray[np.float64]) -> Block:
    """Convert the messages of all ranks [ranks, length]."""
    ranks, first, count = len(messages), round(messages[0, 0]), round(messages[0, 1])
    stamps = messages[:, _ROWS_AT:].reshape(ranks, BLOCK, len(COLUMNS))[:, :count] / 1e3
    elements = messages[:, _ROWS_AT - BLOCK : _ROWS_AT][:, :count]
    values = messages[:, _HEAD : _HEAD + len(FACTS)].T.round(3).tolist()
    facts = {name: row for name, row in zip(FACTS, values, strict=True) if not all(map(math.isnan, row))}
    return Block(first, stamps, facts, elements)


def starts_so_far(path: Path) -> int:
    """Count the starts in a file; 0 if it is missing or not readable."""
    try:
        return sum(line.get("event") == "start" for line in journal_lines(path))
    except OSError:
        return 0


@dataclass
class StepFile:
    """A sink that writes the messages of all ranks, in a thread of its own on rank 0.

    A write error ends the file with a warning; training continues.
    """

    path: Path  # the file; its folder is created
    warn: Callable[[str], None]  # called once on a write error
    clocks: Clocks  # of all ranks; refined by the bounds of each block
    origin_us: float  # zero of the written times, by rank 0's clock
    show: Callable[[dict[str, Any]], None]  # receives an event ``ranks`` per block if there are several ranks
    _file: LineFile | None = None
    _failed: bool = False
    _hosts: Sequence[str] = ()

    def start(self, line: StartLine, now_us: Sequence[float]) -> None:
        """Write the first line of a start. `now_us`: the current time by each rank's clock."""
        self._hosts = line.hosts
        self.append(msgspec.structs.replace(line, clock=ClockLine.from_offsets(self._offsets(now_us))))

    def write(self, record: Mapping[str, Any]) -> None:
        """Write the line of a block and show its event."""
        block = unpack(record["message"])
        sent, received = (block.stamps[:, :, MOMENTS.index(name)] for name in ("sent", "received"))
        self.clocks.add_bounds(sent, received)
        offsets = self._offsets(block.stamps[:, -1, MOMENTS.index("end")].tolist())
        self.append(block_line(block, offsets, self.origin_us))
        if len(offsets) > 1:
            self.show({**ranks_event(block, offsets), "hosts": self._hosts})

    def append(self, line: StartLine | BlockLine) -> None:
        """Append a line, unless an earlier one failed."""
        if self._failed:
            return
        try:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = LineFile(self.path)
            self._file.write(msgspec.to_builtins(line))
        except (OSError, RunDirectoryError) as error:
            self._failed = True
            self.warn(f"{self.path} ends here: {getattr(error, 'strerror', None) or error}; training continues")

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _offsets(self, times_us: Sequence[float]) -> list[Offset]:
        return [self.clocks.offset(rank, us) for rank, us in enumerate(times_us)]


def block_line(block: Block, offsets: Sequence[Offset], origin_us: float) -> BlockLine:
    """Return the line of a block. `offsets` are of the ranks' clocks; `origin_us` as in `StepFile`."""
    values = block.stamps.transpose(2, 0, 1).copy()  # [columns, ranks, steps]
    values[: len(_WRITTEN)] += np.array([[offset.us - origin_us] for offset in offsets])
    present = values.any(axis=(1, 2)).tolist()
    tables = dict(zip(COLUMNS, np.round(values, 1).tolist(), strict=True))
    start, ready, released, end = (tables[name] for name in _WRITTEN)
    parts = {name: tables[name] for name, some in zip(COLUMNS, present, strict=True) if name in DURATIONS and some}
    texts = {
        name: list(values) if name != "gpu_throttle" else [throttle_text(v) for v in values]
        for name, values in block.facts.items()
    }
    clock = ClockLine.from_offsets(offsets)
    elements = block.elements.astype(int).tolist() if block.elements.any() else []
    return BlockLine(block.first, start, ready, released, end, parts, texts, clock, elements)


def ranks_event(block: Block, offsets: Sequence[Offset]) -> dict[str, Any]:
    """Return the event of a block for metric sinks: milliseconds per step of each rank, means over the block.

    Exposed communication is what a rank waits for it after the last one is ready; before, it waits for ranks.
    """
    shift = np.array([offset.us for offset in offsets])[:, None]
    names = ("start", "ready", "end", "received", "wait")
    start, ready, end, received, wait = (block.stamps[:, :, COLUMNS.index(name)] for name in names)
    together = np.isfinite(received).all(axis=0)  # in others, workers train apart
    late = np.where(together, ready + shift - (ready + shift).min(axis=0), 0.0)

    def mean_ms(us: NDArray[np.float64]) -> list[float]:
        known = us[:, np.isfinite(us).all(axis=0)]
        return [round(float(value), 6) for value in known.mean(axis=1) / 1e3] if known.size else []

    return {
        "event": "ranks",
        "first_step": block.first,
        "at_step": block.first + block.stamps.shape[1] - 1,
        "late_ms": mean_ms(late),
        "exposed_ms": mean_ms(np.maximum(0.0, wait - (late.max(axis=0) - late))),
        "wait_ms": mean_ms(late.max(axis=0) - late),
        "step_ms": mean_ms(end - start),
        "facts": block.facts,
    }
