"""Readers of a run's traces: the step stamps of all ranks, and the spans of each, on rank 0's clock."""

from __future__ import annotations

import math
import re
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import orjson

from hvdtrain.files import GrowingFile, open_regular
from hvdtrain.observe.span_trace import BUCKET, CLOCK, SpanClock, host_of
from hvdtrain.observe.step_format import VERSION, BlockLine, ClockLine, Numbers, StartLine, as_array
from hvdtrain.run_layout import TimelineLayout
from hvdtrain.spans import PARTS
from hvdtrain.timeline.columns import BucketFacts, Floats, RankSpans, StepTable


@dataclass(frozen=True)
class Start:
    """One start of a run."""

    number: int  # from 0; -1 if unknown
    at_step: int  # the step from which it resumed
    link: Sequence[tuple[int, float]]  # allreduces measured at the start: pairs of bytes and seconds
    steps: StepTable  # empty if the start ended before the first block
    clock_us: Floats  # times of the offsets, by rank 0's clock [k]
    offset_us: Floats  # rank 0's clock minus the rank's clock, NaN if unknown [k, ranks]
    error_us: Floats  # bound of the offset's error [k, ranks]
    dropped: Sequence[str]  # sentences about lines that could not be used


def read_starts(folder: Path) -> list[Start]:
    """Read all starts of a run. Damaged lines, and starts of another version, are skipped and listed in `dropped`.

    `folder` is that of the traces. Without a file of stamps the list is empty.
    """
    return StampReader(folder).read(whole=False)


class StampReader:
    """Reads the stamps of a run, and later only the lines that were added since. Arguments as of `read_starts`."""

    def __init__(self, folder: Path) -> None:
        self._file = GrowingFile(TimelineLayout(folder).steps)
        self._heads: list[tuple[StartLine | None, int, list[BlockLine], list[str]]] = []
        self._lines = 0

    def read(self, *, whole: bool = True) -> list[Start]:
        """Return the starts up to now. `whole`: the last line must have ended."""
        if not self._file.path.is_file():
            return []
        if self._file.begins_again():
            self._heads, self._lines = [], 0
        for raw in self._file.new_lines(whole=whole):
            self._lines += 1
            if raw.strip():
                self._add(raw)
        no_ranks = StartLine(VERSION, -1, 0, 0, [], [], 0.0)
        return [_start(head or no_ranks, number, blocks, dropped) for head, number, blocks, dropped in self._heads]

    def _add(self, raw: bytes) -> None:
        line, heads, number = _decode(raw), self._heads, self._lines
        head = heads[-1][0] if heads else None
        if isinstance(line, (StartLine, _DamagedStart)):
            if isinstance(line, StartLine) and line.version == VERSION and line.fits():
                heads.append((line, line.start, [], []))
                return
            text = f"line {number} of steps.jsonl, the first of a start, is damaged: the start is ignored"
            if line.version != VERSION:
                text = f"a start in steps.jsonl has format {line.version}, this program reads {VERSION}: it is ignored"
            heads.append((None, line.start if isinstance(line.start, int) else -1, [], [text]))
        elif head is not None and isinstance(line, BlockLine) and line.fits(head.size):
            for name in _TABLES:  # arrays take less memory, and less time to join at each reading
                setattr(line, name, as_array(getattr(line, name)))
            line.parts_us = {name: as_array(table) for name, table in line.parts_us.items()}  # type: ignore[misc]
            heads[-1][2].append(line)
        elif head is not None:
            heads[-1][3].append(f"line {number} of steps.jsonl is damaged and ignored")


_TABLES = ("start_us", "ready_us", "released_us", "end_us", "elements")
_DEVICE_US = 100.0
"""By how much a device may disagree with its host's clock: see `training.records.device_spans.SLACK_NS`."""


class _DamagedStart(msgspec.Struct):
    """The readable fields of a damaged start."""

    event: Literal["start"]
    version: Any = None
    start: Any = -1


_LINE = msgspec.json.Decoder(StartLine | BlockLine)
_DAMAGED_START = msgspec.json.Decoder(_DamagedStart)


def _decode(raw: bytes) -> StartLine | BlockLine | _DamagedStart | None:
    for decoder in (_LINE, _DAMAGED_START):
        with suppress(msgspec.DecodeError, ValueError, RecursionError):
            line: StartLine | BlockLine | _DamagedStart = decoder.decode(raw)
            return line
    return None


def _start(head: StartLine, number: int, blocks: Sequence[BlockLine], dropped: Sequence[str]) -> Start:
    def joined(tables: Sequence[Any], shift_us: float = 0.0) -> Floats:
        return np.concatenate([np.empty((head.size, 0)), *tables], axis=1) + shift_us

    step = np.concatenate([np.empty(0), *(block.first_step + np.arange(block.steps) for block in blocks)])
    block_number = np.repeat(np.arange(len(blocks)), [block.steps for block in blocks])
    start, ready, released, end = (joined([block.moments[k] for block in blocks], head.origin_us) for k in range(4))
    parts = {
        name: joined([block.parts_us.get(name, np.zeros((head.size, block.steps))) for block in blocks])
        for name in (*PARTS, "gc")
    }
    known = np.isfinite([start, ready, released, end]).all(axis=(0, 1))  # a step is useless if a rank lacks it
    devices = head.devices or [""] * head.size
    of_device = np.array([_DEVICE_US if device else 0.0 for device in devices])
    errors = np.concatenate([np.zeros((1, head.size)), *(as_array([block.clock.error_us]) for block in blocks)])
    steps = StepTable(
        hosts=head.hosts,
        devices=devices,
        step=step[known].astype(np.int32),
        block=block_number[known].astype(np.int32),
        start_us=start[:, known],
        ready_us=ready[:, known],
        released_us=released[:, known],
        end_us=end[:, known],
        parts_us={name: values[:, known] for name, values in parts.items()},
        facts=[block.facts for block in blocks],
        clock_error_us=np.where(np.isnan(errors), np.inf, errors).max(axis=0) + of_device,
        elements=joined([b.elements if len(b.elements) else np.zeros((head.size, b.steps)) for b in blocks])[:, known],
        stages=head.consecutive_stages,
    )
    ends_us = [float(np.nan_to_num(block.end_us[0][-1] or 0.0)) for block in blocks]
    zeros: Numbers = [0.0] * head.size
    clocks = [head.clock or ClockLine(zeros, zeros), *(block.clock for block in blocks)]
    return Start(
        number=number,
        at_step=head.at_step,
        link=head.link,
        steps=steps,
        clock_us=as_array([0.0, *ends_us]) + head.origin_us,
        offset_us=as_array([clock.offset_us for clock in clocks]),
        error_us=as_array([clock.error_us for clock in clocks]),
        dropped=list(dropped),
    )


_FILE = re.compile(r"spans-rank-(\d+)(?:-\d+)?\.json")
_START = re.compile(rb'"name":\s*"clock".{0,1000}?"start":\s*(-?\d+)', re.DOTALL)
_HEAD = 1 << 16
"""The first bytes of a file, which contain its clock."""
_COLUMNS = 5


def read_span_files(
    folder: Path, most_bytes: float = math.inf, start: int | None = None, most_spans: int = sys.maxsize
) -> list[RankSpans]:
    """Read the newest file of each rank in one start of a run, by the rank's own clock. Unreadable files are skipped.

    Args:
        folder: ``RUN/timeline``.
        most_bytes: limit of the total size; files of later ranks are skipped.
        start: number of the start (default: the last one).
        most_spans: of all files together; the last ones of each are kept.
    """
    named = [(name, path) for path in folder.glob(TimelineLayout.SPANS) if (name := _FILE.fullmatch(path.name))]
    paths = [path for _, path in sorted((int(name[1]), path) for name, path in named)]
    starts = {path: _start_of(path) for path in paths}
    wanted = max(starts.values(), default=-1) if start is None else start
    chosen = [path for path in paths if starts[path] == wanted]
    each = max(1, most_spans // max(1, len(chosen)))
    totals = accumulate(path.stat().st_size for path in chosen)
    fitting = [path for path, total in zip(chosen, totals, strict=True) if total <= most_bytes]
    found = [spans for path in fitting if (spans := _read(path, each)) is not None]
    newest = {spans.rank: spans for spans in sorted(found, key=lambda spans: spans.epoch_us)}
    return [newest[rank] for rank in sorted(newest)]


def _start_of(path: Path) -> int:
    """Return the number of a file's start; -1 if unknown."""
    with suppress(OSError), open_regular(path) as file:
        if found := _START.search(file.read(_HEAD)):
            return int(found[1])
    return -1


def on_one_clock(ranks: Sequence[RankSpans], starts: Sequence[Start]) -> list[RankSpans]:
    """Return the spans of each rank on rank 0's clock.

    If a rank's clock was never compared with rank 0's, the wall clocks align it, with an infinite error.
    """
    by_number = {start.number: start for start in starts}
    rank_0 = next((spans for spans in ranks if spans.rank == 0), None)
    return [_moved(spans, rank_0, by_number.get(spans.start)) for spans in ranks]


def wall_clock_us(ranks: Sequence[RankSpans]) -> float | None:
    """Return the wall clock (microseconds since 1970) at time 0 of rank 0's clock; None if unknown."""
    return next((spans.epoch_us for spans in ranks if spans.rank == 0), None)


def _read(path: Path, most_spans: int) -> RankSpans | None:
    """Read the last spans of a file; None if it is not a span file."""
    try:
        return _spans(_events(path), most_spans)
    except (OSError, KeyError, TypeError, ValueError, AttributeError, msgspec.ValidationError):
        return None


def _events(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield events line by line, to save memory; or from the whole file if another program wrote it."""
    with open_regular(path) as file:
        if file.readline(8).strip() != b"[":
            file.seek(0)
            yield from (event for event in orjson.loads(file.read()) if isinstance(event, dict))
            return
        for raw in file:
            if (line := raw.strip().rstrip(b",")) not in (b"", b"]"):
                yield orjson.loads(line)


def _spans(events: Iterator[Mapping[str, Any]], most: int) -> RankSpans:
    head: dict[str, Mapping[str, Any]] = {}
    buckets: dict[int, BucketFacts] = {}
    number: dict[str, int] = {}
    rows = array("d")  # name, track, step, begin and length of each span
    dropped = 0

    def drop_first() -> int:
        more = max(0, len(rows) // _COLUMNS - most)
        del rows[: more * _COLUMNS]
        return more

    for event in events:
        kind = event.get("ph")
        if kind == "M" and event["name"] == BUCKET:
            buckets[int(event["tid"])] = BucketFacts(**event["args"])
        elif kind == "M":
            head[event["name"]] = event
        elif kind == "X":
            name = number.setdefault(event["name"], len(number))
            rows.extend((name, event["tid"], event["args"]["step"], event["ts"], event["dur"]))
            if len(rows) >= 2 * most * _COLUMNS:
                dropped += drop_first()
    dropped += drop_first()
    names, track, step, start_us, length_us = np.frombuffer(rows, np.float64).reshape(-1, _COLUMNS).T
    clock = msgspec.convert(head[CLOCK]["args"], SpanClock)
    begin_us = start_us + clock.monotonic_us
    return RankSpans(
        rank=int(head[CLOCK]["pid"]),
        host=host_of(head["process_name"]["args"]["name"]),
        names=list(number),
        name=names.astype(np.int16),
        track=track.astype(np.int32),
        step=step.astype(np.int32),
        start_us=begin_us,
        end_us=begin_us + length_us,
        buckets=buckets,
        epoch_us=clock.start_time_since_epoch_in_micros - clock.monotonic_us,
        clock_id=clock.clock_id,
        start=clock.start,
        dropped=dropped,
    )


def _moved(spans: RankSpans, rank_0: RankSpans | None, start: Start | None) -> RankSpans:
    """Convert times to rank 0's clock."""
    if spans.rank == 0 or (rank_0 is not None and spans.clock_id and spans.clock_id == rank_0.clock_id):
        return spans
    shift_us = spans.epoch_us - rank_0.epoch_us if rank_0 is not None else 0.0
    times, shifts, error_us = np.zeros(1), np.array([shift_us]), math.inf
    if start is not None and spans.rank < start.offset_us.shape[1]:
        offset, error = start.offset_us[:, spans.rank], start.error_us[:, spans.rank]
        known = np.isfinite(offset) & np.isfinite(error)
        if known.any():  # times by the rank's own clock
            times, shifts, error_us = (start.clock_us - offset)[known], offset[known], float(error[known].max())
    begin_us, end_us = (us + np.interp(us, times, shifts) for us in (spans.start_us, spans.end_us))
    epoch_us = spans.epoch_us - float(begin_us[0] - spans.start_us[0] if len(begin_us) else 0.0)
    return replace(spans, start_us=begin_us, end_us=end_us, clock_error_us=error_us, epoch_us=epoch_us)
