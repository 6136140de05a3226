"""Horovod's Timelines as trace events: each file a process. Tensors that never overlap share a track."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from hvdtrain.timeline.columns import HorovodTrace
from hvdtrain.timeline.merging.ranks import metadata
from hvdtrain.timeline.merging.sink import Event

_CHUNK = 1 << 16


def horovod_events(trace: HorovodTrace, pid: int, title: str, place: int, shift_us: float) -> Iterator[Event]:
    """Yield all events of a Timeline.

    Args:
        trace: the Timeline.
        pid: number of its process.
        title: name of its process.
        place: position of its process.
        shift_us: added to its times.
    """
    yield metadata("process_name", pid, 0, name=title)
    yield metadata("process_sort_index", pid, 0, sort_index=place)
    track = _tracks(trace)
    names: dict[int, str] = {}
    for tensor, number in enumerate(track.tolist()):
        if number >= 0:
            names[number] = trace.tensors[tensor] if number not in names else "several tensors"
    for number, name in names.items():
        yield metadata("thread_name", pid, number, name=name or "(no name)")
        yield metadata("thread_sort_index", pid, number, sort_index=number)
    yield from _spans(trace, pid, track, shift_us)
    for begin in range(0, len(trace.tick_us), _CHUNK):
        part = slice(begin, begin + _CHUNK)
        columns = (trace.tick_tensor[part], trace.tick_rank[part], trace.tick_us[part] + shift_us)
        for tensor, rank, us in zip(*(column.tolist() for column in columns), strict=True):
            tid = int(track[tensor])
            yield {"name": f"rank {rank} is ready", "ph": "i", "s": "t", "pid": pid, "tid": tid, "ts": round(us, 3)}


def _spans(trace: HorovodTrace, pid: int, track: NDArray[np.int64], shift_us: float) -> Iterator[Event]:
    order = np.lexsort((-trace.duration_us, trace.start_us))
    for begin in range(0, len(order), _CHUNK):
        part = order[begin : begin + _CHUNK]
        columns = (
            trace.tensor[part],
            trace.phase[part],
            trace.start_us[part] + shift_us,
            trace.duration_us[part],
            trace.nbytes[part],
        )
        for tensor, phase, us, duration, nbytes in zip(*(column.tolist() for column in columns), strict=True):
            arguments = {"tensor": trace.tensors[tensor]} | ({"bytes": nbytes} if nbytes >= 0 else {})
            yield {
                "name": trace.phases[phase],
                "ph": "X",
                "pid": pid,
                "tid": int(track[tensor]),
                "ts": round(us, 3),
                "dur": duration,
                "args": arguments,
            }


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
    count = 0
    for tensor in np.argsort(first, kind="stable")[: int(np.isfinite(first).sum())].tolist():
        if free and free[0][0] < first[tensor]:
            _, number = heapq.heappop(free)
        else:
            count += 1
            number = count
        track[tensor] = number
        heapq.heappush(free, (float(last[tensor]), number))
    return track
