"""A trace of torch.profiler, read in pieces, as additional tracks of its rank.

Times are microseconds since ``baseTimeNanoseconds``, which counts from 1970 (0 in older traces).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.timeline.merging.tracks import Event, labels
from hvdtrain.timeline.reading.events import read_chunks, salvage

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
