"""The events of a merged trace: our spans, Horovod's Timelines, torch.profiler's traces; and the file of them.

Each rank is a process, with training thread, device and exchanges as tracks. Each Timeline is a process, in which
tensors that never overlap share a track.
"""

from __future__ import annotations

import gzip
import heapq
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import orjson
from numpy.typing import NDArray

from hvdtrain.files import replacing
from hvdtrain.spans import DEVICE, EXCHANGE, MAIN
from hvdtrain.timeline.columns import HorovodTrace, RankSpans, StepTable
from hvdtrain.timeline.reading.events import read_chunks, salvage

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
    """Yield a mark in each traced step when the last rank is ready, if the clocks are precise enough."""
    steps = np.unique(np.concatenate([np.empty(0, np.int32), *(spans.step for spans in traced)]))
    for column in np.flatnonzero(np.isin(table.step, steps)).tolist():
        ready = table.ready_us[:, column]
        last = int(ready.argmax())
        ahead_us = float(ready[last] - np.partition(ready, -2)[-2]) if len(ready) > 1 else 0.0
        if ahead_us <= table.clock_error_us.max() or ready[last] < zero_us:
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

    Errors:
        OSError: it cannot be written; `path` is unchanged.
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


_PIECE_BYTES = 1 << 20
_BASE = re.compile(rb'"baseTimeNanoseconds"\s*:\s*(\d+)')
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_AFTER = re.compile(rb'"\w+"\s*:')
"""Other entries of the file, after the events."""

_FLOWS = ("s", "t", "f")
_ID_BITS = 32
_FIRST_TRACK = 1 << 16
"""Our tracks have lower numbers."""


@dataclass(frozen=True)
class Profile:
    """The wall clock at time 0 of a profile, and when its first and last events begin; infinite without events."""

    base_us: float
    first_us: float
    last_us: float


def read_times(path: Path, notes: list[str]) -> Profile:
    """Read the times of a profile, a plain or gzip file; append to `notes` if parts are not readable.

    Errors:
        OSError: it cannot be read.
    """
    base_us, first_us, last_us = 0.0, math.inf, -math.inf
    for base, item in _items(path, notes):
        if _is_shown(item):
            base_us, first_us, last_us = base, min(first_us, item["ts"]), max(last_us, item["ts"])
    return Profile(base_us, first_us, last_us)


def profile_events(path: Path, rank: int, shift_us: float) -> Iterator[Event]:
    """Yield the events of a profile as those of a rank, with `shift_us` added to their times."""
    tracks: dict[tuple[int, int], int] = {}
    processes: dict[int, str] = {}
    for _, item in _items(path, []):
        if item["ph"] == "M" and type(item.get("pid")) is int:
            yield from _named(item, rank, tracks, processes)
        if not _is_shown(item):
            continue
        pid, tid = item["pid"], item["tid"]
        if (pid, tid) not in tracks:
            yield from _track(tracks, rank, pid, tid, f"torch: {tid}")
        event = {**item, "pid": rank, "tid": tracks[pid, tid], "ts": round(item["ts"] + shift_us, 3)}
        if item["ph"] in _FLOWS:
            event["id"] = (rank << _ID_BITS) + item["id"]
        yield event


def _named(item: Event, rank: int, tracks: dict[tuple[int, int], int], processes: dict[int, str]) -> Iterator[Event]:
    """Convert Kineto's metadata to tracks. In Kineto a GPU is a process and a stream a thread."""
    pid, tid, arguments = item["pid"], item.get("tid"), item.get("args", {})
    if item["name"] == "process_labels":
        processes[pid] = str(arguments.get("labels", ""))
    elif item["name"] == "thread_name" and type(tid) is int and (pid, tid) not in tracks:
        label = processes.get(pid, "")
        where = f"{label} " if label.startswith("GPU") else ""
        yield from _track(tracks, rank, pid, tid, f"torch: {where}{str(arguments.get('name', tid)).strip()}")


def _track(tracks: dict[tuple[int, int], int], rank: int, pid: Any, tid: Any, name: str) -> Iterator[Event]:
    tracks[pid, tid] = number = _FIRST_TRACK + len(tracks)
    yield from labels("thread", rank, number, name, number)


def _is_shown(item: Event) -> bool:
    if item["ph"] not in ("X", "i", *_FLOWS) or type(item.get("pid")) is not int or type(item.get("tid")) is not int:
        return False
    more = {"X": "dur", **dict.fromkeys(_FLOWS, "id")}.get(item["ph"], "ts")
    numbers = all(isinstance(item.get(key), int | float) for key in ("ts", more))
    return numbers and isinstance(item.get("name"), str)


def _items(path: Path, notes: list[str]) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yield the events, each with the base in microseconds, 0 if the file lacks it."""
    base_us, begun, lost = 0.0, False, 0
    for chunk in read_chunks(path, _PIECE_BYTES, notes):
        events = chunk
        if not begun and (found := _EVENTS.search(chunk)):
            if base := _BASE.search(chunk, 0, found.end()):
                base_us = int(base[1]) / 1e3
            events = chunk[found.end() :]
        begun = begun or found is not None or chunk.lstrip().startswith(b"[")
        for begin, _, item in salvage(events):
            lost += begun and not item and not _AFTER.match(events, begin)
            if item:
                yield base_us, item
    if lost:
        notes.append(f"{path.name}: {lost} places could not be read")
