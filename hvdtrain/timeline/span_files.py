"""Reads ``spans-rank-N.json``: what each rank did when, on rank 0's clock."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from hvdtrain.timeline.columns import BucketFacts, Floats, RankSpans
from hvdtrain.timeline.steps import Start, read_starts

_FILE = re.compile(r"spans-rank-(\d+)(?:-\d+)?\.json")
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


def read_spans(folder: Path) -> list[RankSpans]:
    """The spans of the last start of a run (``RUN/timeline``, or the run), as `on_one_clock` gives them."""
    return on_one_clock(read_span_files(folder), read_starts(folder))


def read_span_files(folder: Path, most_bytes: float = math.inf) -> list[SpanFile]:
    """All starts' files of a run; what is damaged beyond reading is left out.

    Args:
        folder: ``RUN/timeline``, or the run.
        most_bytes: files of all ranks that are read; of later ranks those that would be more are absent.
    """
    return [file for path in _fitting(_paths(folder), most_bytes) if (file := read_span_file(path)) is not None]


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
        events = [event for event in orjson.loads(path.read_bytes()) if isinstance(event, dict)]
    except (OSError, ValueError, TypeError):
        return None
    try:
        return _file(events)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _file(events: Sequence[Mapping[str, Any]]) -> SpanFile:
    told = {event["name"]: event for event in events if event.get("ph") == "M"}
    clock = told["clock"]["args"]
    title = _TITLE.fullmatch(told["process_name"]["args"]["name"])
    buckets = {
        int(event["tid"]): BucketFacts(**event["args"])
        for event in events
        if event.get("ph") == "M" and event["name"] == "bucket"
    }
    spans = [event for event in events if event.get("ph") == "X"]
    names = list(dict.fromkeys(event["name"] for event in spans))
    number = {name: index for index, name in enumerate(names)}
    start_us = _column(event["ts"] for event in spans)
    origin_us = float(clock.get("monotonic_us", 0.0))
    return SpanFile(
        spans=RankSpans(
            rank=int(told["clock"]["pid"]),
            host=title[1] if title else "",
            names=names,
            name=np.array([number[event["name"]] for event in spans], dtype=np.int16),
            track=np.array([event["tid"] for event in spans], dtype=np.int32),
            step=np.array([event["args"]["step"] for event in spans], dtype=np.int32),
            start_us=start_us + origin_us,
            end_us=start_us + _column(event["dur"] for event in spans) + origin_us,
            buckets=buckets,
        ),
        start=int(clock.get("start", -1)),
        clock_id=str(clock.get("clock_id", "")),
        epoch_us=float(clock["start_time_since_epoch_in_micros"]) - origin_us,
    )


def _column(values: Iterable[float]) -> Floats:
    return np.array(list(values), dtype=np.float64)


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
    for where in (folder, folder / "timeline"):
        found = sorted(path for path in where.glob("spans-rank-*.json") if _FILE.fullmatch(path.name))
        if found:
            return found
    return []
