"""Reads ``spans-rank-N.json``: what each rank did when, on rank 0's clock."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from hvdtrain.regular import open_regular
from hvdtrain.run_layout import RunLayout, TimelineLayout
from hvdtrain.timeline.columns import BucketFacts, Floats, RankSpans
from hvdtrain.timeline.steps import Start

_FILE = re.compile(r"spans-rank-(\d+)(?:-\d+)?\.json")
_START = re.compile(rb'"name":\s*"clock".{0,1000}?"start":\s*(-?\d+)', re.DOTALL)
_HEAD = 1 << 16
"""Bytes at a file's begin in which its clock is told."""
_TITLE = re.compile(r"rank \d+ on (.*)", re.DOTALL)


@dataclass(frozen=True)
class SpanFile:
    """One file: one rank in one start, by its own clock.

    Attributes:
        spans: times by `time.perf_counter_ns`, in microseconds.
        start: number of the start; -1 where the file does not say.
        clock_id: equal ones are one clock.
        epoch_us: the wall clock at time 0 of the rank's clock.
    """

    spans: RankSpans
    start: int
    clock_id: str
    epoch_us: float


def read_span_files(folder: Path, most_bytes: float = math.inf, start: int | None = None) -> list[SpanFile]:
    """The files of one start of a run; what is damaged beyond reading is left out.

    Args:
        folder: ``RUN/timeline``, or the run.
        most_bytes: files of all ranks that are read; of later ranks those that would be more are absent.
        start: its number; the last one's where none is given.
    """
    paths = _paths(folder)
    starts = {path: _start_of(path) for path in paths}
    wanted = max(starts.values(), default=-1) if start is None else start
    chosen = [path for path in paths if starts[path] == wanted]
    return [file for path in _fitting(chosen, most_bytes) if (file := read_span_file(path)) is not None]


def _start_of(path: Path) -> int:
    """The number of the start that a file is of, by its first lines; -1 where they don't say."""
    try:
        with open_regular(path) as file:
            found = _START.search(file.read(_HEAD))
    except OSError:
        return -1
    return int(found[1]) if found else -1


def on_one_clock(files: Sequence[SpanFile], told: Sequence[Start]) -> list[RankSpans]:
    """The spans of the last start, a rank each, on rank 0's clock; ranks that left none are absent.

    A rank whose clock was never compared with rank 0's is taken by the system's clocks, with an error of infinity.

    Args:
        files: of a run.
        told: its starts, with what is known of the ranks' clocks.
    """
    newest = of_last_start(files)
    starts = {start.number: start for start in told}
    return [_moved(file, newest.get(0), starts.get(file.start)) for _, file in sorted(newest.items())]


def of_last_start(files: Sequence[SpanFile]) -> dict[int, SpanFile]:
    """By rank the file of the last start, the newest where there are several."""
    last = max((file.start for file in files), default=-1)
    newest: dict[int, SpanFile] = {}
    for file in files:
        if file.start == last and (file.spans.rank not in newest or newest[file.spans.rank].epoch_us <= file.epoch_us):
            newest[file.spans.rank] = file
    return newest


def wall_clock_us(files: Sequence[SpanFile]) -> float | None:
    """What to add to times by rank 0's clock, in its last start, to have microseconds since 1970; None without it."""
    found = [(file.start, file.epoch_us) for file in files if file.spans.rank == 0]
    return max(found)[1] if found else None


def read_span_file(path: Path) -> SpanFile | None:
    """One file; None where it is no trace of ours."""
    try:
        return _file(_events(path))
    except (OSError, KeyError, TypeError, ValueError, AttributeError):
        return None


def _events(path: Path) -> Iterator[Mapping[str, Any]]:
    """Line by line, as they were written, without the whole in memory; or all at once where lines are others."""
    with open_regular(path) as file:
        if file.readline(8).strip() != b"[":
            file.seek(0)
            yield from (event for event in orjson.loads(file.read()) if isinstance(event, dict))
            return
        for raw in file:
            if (line := raw.strip().rstrip(b",")) not in (b"", b"]"):
                yield orjson.loads(line)


def _file(events: Iterator[Mapping[str, Any]]) -> SpanFile:
    told: dict[str, Mapping[str, Any]] = {}
    buckets: dict[int, BucketFacts] = {}
    number: dict[str, int] = {}
    name, track, step = array("i"), array("i"), array("i")
    start_us, length_us = array("d"), array("d")
    for event in events:
        kind = event.get("ph")
        if kind == "M" and event["name"] == "bucket":
            buckets[int(event["tid"])] = BucketFacts(**event["args"])
        elif kind == "M":
            told[event["name"]] = event
        elif kind == "X":
            name.append(number.setdefault(event["name"], len(number)))
            track.append(event["tid"])
            step.append(event["args"]["step"])
            start_us.append(event["ts"])
            length_us.append(event["dur"])
    clock = told["clock"]["args"]
    title = _TITLE.fullmatch(told["process_name"]["args"]["name"])
    origin_us = float(clock.get("monotonic_us", 0.0))
    begin_us = np.array(start_us, np.float64) + origin_us
    return SpanFile(
        spans=RankSpans(
            rank=int(told["clock"]["pid"]),
            host=title[1] if title else "",
            names=list(number),
            name=np.array(name, np.int16),
            track=np.array(track, np.int32),
            step=np.array(step, np.int32),
            start_us=begin_us,
            end_us=begin_us + np.array(length_us, np.float64),
            buckets=buckets,
        ),
        start=int(clock.get("start", -1)),
        clock_id=str(clock.get("clock_id", "")),
        epoch_us=float(clock["start_time_since_epoch_in_micros"]) - origin_us,
    )


def _moved(file: SpanFile, rank_0: SpanFile | None, start: Start | None) -> RankSpans:
    """On rank 0's clock."""
    spans = file.spans
    if spans.rank == 0 or (rank_0 is not None and file.clock_id and file.clock_id == rank_0.clock_id):
        return spans
    if start is not None and spans.rank < start.offset_us.shape[1]:
        offset, error = start.offset_us[:, spans.rank], start.error_us[:, spans.rank]
        known = np.isfinite(offset) & np.isfinite(error)
        if known.any():
            times = start.clock_us[known] - offset[known]  # of the rank's own clock

            def shifted(us: Floats) -> Floats:
                moved: Floats = us + np.interp(us, times, offset[known])
                return moved

            worst = float(error[known].max())
            return replace(spans, start_us=shifted(spans.start_us), end_us=shifted(spans.end_us), clock_error_us=worst)
    shift_us = file.epoch_us - rank_0.epoch_us if rank_0 is not None else 0.0
    return replace(
        spans, start_us=spans.start_us + shift_us, end_us=spans.end_us + shift_us, clock_error_us=float("inf")
    )


def _fitting(paths: Sequence[Path], most_bytes: float) -> Iterator[Path]:
    """The files of the first ranks that are together no larger."""
    left = most_bytes
    for path in sorted(paths, key=_rank):
        left -= path.stat().st_size
        if left < 0:
            return
        yield path


def _rank(path: Path) -> int:
    found = _FILE.fullmatch(path.name)
    assert found is not None
    return int(found.group(1))


def _paths(folder: Path) -> list[Path]:
    for where in (folder, RunLayout(folder).timeline.folder):
        found = sorted(path for path in where.glob(TimelineLayout.SPANS) if _FILE.fullmatch(path.name))
        if found:
            return found
    return []
