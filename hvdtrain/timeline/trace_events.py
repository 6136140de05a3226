"""The events of a merged trace: our spans and Horovod's Timelines; and the file of them.

Each rank is a process, with training thread, device and exchanges as tracks. Each Timeline is a process, in which
tensors that never overlap share a track.
"""

from __future__ import annotations

import gzip
import heapq
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import orjson
from numpy.typing import NDArray

from hvdtrain.files import replacing
from hvdtrain.spans import DEVICE, EXCHANGE, MAIN
from hvdtrain.timeline.columns import HorovodTrace, RankSpans, StepTable

Event = Mapping[str, Any]

_TOGETHER = 4096
_LEVEL = 5
"""Of gzip: half the time of the default level, 5% more bytes."""

_GC = 1 << 15
"""Garbage collection has its own track, because one of another thread may overlap a step's begin."""

_CHUNK = 1 << 16
_TRACKS = {MAIN: "training thread", DEVICE: "device", _GC: "garbage collection"}


def labels(kind: str, pid: int, tid: int, name: str, place: int) -> Iterator[Event]:
    """Yield the events that name and order a process, or a track of it (kind "thread")."""
    for suffix, arguments in (("name", {"name": name}), ("sort_index", {"sort_index": place})):
        yield {"name": f"{kind}_{suffix}", "ph": "M", "pid": pid, "tid": tid, "args": arguments}


def span_events(spans: RankSpans, zero_us: float) -> Iterator[Event]:
    """Yield a rank's spans, longer ones first if several begin together."""
    tracks = np.where(spans.named("gc"), _GC, spans.track)
    for track in np.unique(tracks).tolist():
        bucket = spans.buckets.get(track)
        name = _TRACKS.get(track, f"exchange of bucket {track - EXCHANGE}")
        if bucket is not None:
            name += f": {bucket.name}"
        yield from labels("thread", spans.rank, track, name, track)
    order = np.lexsort((-spans.end_us, spans.start_us))
    start, end = np.round(spans.start_us - zero_us, 3), np.round(spans.end_us - zero_us, 3)
    for name, tid, step, begin, until in _rows(order, spans.name, tracks, spans.step, start, end):
        times = {"ts": begin, "dur": round(until - begin, 3)}
        yield {"name": spans.names[name], "ph": "X", "pid": spans.rank, "tid": tid, **times, "args": {"step": step}}


def late_events(table: StepTable, traced: Sequence[RankSpans], zero_us: float) -> Iterator[Event]:
    """Yield a mark in each traced step when the last rank is ready, if it has spans and clocks are precise enough."""
    ranks = {spans.rank for spans in traced}
    steps = np.unique(np.concatenate([np.empty(0, np.int32), *(spans.step for spans in traced)]))
    for column in np.flatnonzero(np.isin(table.step, steps)).tolist():
        ready = table.ready_us[:, column]
        last = int(ready.argmax())
        ahead_us = float(ready[last] - np.partition(ready, -2)[-2]) if len(ready) > 1 else 0.0
        if last not in ranks or ahead_us <= table.clock_error_us.max() or ready[last] < zero_us:
            continue
        name, ts = f"rank {last} is the last to be ready", float(round(ready[last] - zero_us, 3))
        facts = {"step": int(table.step[column]), "after the rank before it, us": round(ahead_us, 1)}
        yield {"name": name, "ph": "i", "s": "t", "pid": last, "tid": MAIN, "ts": ts, "args": facts}


def horovod_events(trace: HorovodTrace, pid: int, title: str, place: int, shift_us: float) -> Iterator[Event]:
    """Yield all events of a Timeline as process `pid` at position `place`, with `shift_us` added to their times."""
    yield from labels("process", pid, 0, title, place)
    track = _tracks(trace)
    names: dict[int, str] = {}
    for tensor, number in enumerate(track.tolist()):
        if number >= 0:
            names[number] = trace.tensors[tensor] if number not in names else "several tensors"
    for number, name in names.items():
        yield from labels("thread", pid, number, name or "(no name)", number)
    order = np.lexsort((-trace.duration_us, trace.start_us))
    columns = (trace.tensor, trace.phase, trace.start_us, trace.duration_us, trace.nbytes)
    for tensor, phase, us, duration, nbytes in _rows(order, *columns):
        times = {"ts": round(us + shift_us, 3), "dur": duration}
        facts = {"tensor": trace.tensors[tensor]} | ({"bytes": nbytes} if nbytes >= 0 else {})
        yield {"name": trace.phases[phase], "ph": "X", "pid": pid, "tid": int(track[tensor]), **times, "args": facts}
    ticks = np.arange(len(trace.tick_us))
    for tensor, rank, us in _rows(ticks, trace.tick_tensor, trace.tick_rank, trace.tick_us):
        tid, ts = int(track[tensor]), round(us + shift_us, 3)
        yield {"name": f"rank {rank} is ready", "ph": "i", "s": "t", "pid": pid, "tid": tid, "ts": ts}


def _rows(places: NDArray[np.int64], *columns: NDArray[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield the rows at some places; only a part of them is in memory."""
    for begin in range(0, len(places), _CHUNK):
        part = places[begin : begin + _CHUNK]
        yield from zip(*(column[part].tolist() for column in columns), strict=True)


def _tracks(trace: HorovodTrace) -> NDArray[np.int64]:
    """Return the track of each tensor, from 1 in order of appearance; -1 without events."""
    first = np.full(len(trace.tensors), np.inf)
    last = np.full(len(trace.tensors), -np.inf)
    for tensor, start, end in (
        (trace.tensor, trace.start_us, trace.start_us + trace.duration_us),
        (trace.tick_tensor, trace.tick_us, trace.tick_us),
    ):
        np.minimum.at(first, tensor, start)
        np.maximum.at(last, tensor, end)
    track = np.full(len(trace.tensors), -1)
    free: list[tuple[float, int]] = []
    for tensor in np.argsort(first, kind="stable")[: int(np.isfinite(first).sum())].tolist():
        number = heapq.heappop(free)[1] if free and free[0][0] < first[tensor] else len(free) + 1
        track[tensor] = number
        heapq.heappush(free, (float(last[tensor]), number))
    return track


def write_trace(path: Path, events: Iterator[Event], facts: Mapping[str, Any]) -> int:
    """Write events in Google's Trace Event Format, JSON object form, with `facts` as its other data.

    It is gzip if its name ends in .gz. Returns the number of events.

    Errors: OSError: it cannot be written; `path` is unchanged.
    """
    count = 0
    with replacing(path) as temporary, ExitStack() as stack:
        file: IO[bytes] = stack.enter_context(temporary.open("wb"))
        if path.suffix == ".gz":
            file = cast(IO[bytes], stack.enter_context(gzip.GzipFile(path.stem, "wb", _LEVEL, file, mtime=0)))
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        while lines := [orjson.dumps(event) for event in islice(events, _TOGETHER)]:
            file.write((b",\n" if count else b"") + b",\n".join(lines))
            count += len(lines)
        file.write(b'\n],"otherData":' + orjson.dumps(facts) + b"}\n")
    return count
