"""Our spans as trace events: each rank a process, with training thread, device and exchanges as tracks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hvdtrain.spans import DEVICE, EXCHANGE, MAIN
from hvdtrain.timeline.columns import RankSpans, StepTable
from hvdtrain.timeline.merging.sink import Event

_GC = 1 << 15
"""Garbage collection has its own track, because one of another thread may overlap a step's begin."""

_TRACKS = {MAIN: "training thread", DEVICE: "device", _GC: "garbage collection"}


def head(rank: int, host: str, place: int) -> Iterator[Event]:
    """Yield metadata of a rank's process at position `place`."""
    name = f"rank {rank} on {host}" if host else f"rank {rank}"
    yield metadata("process_name", rank, 0, name=name)
    yield metadata("process_sort_index", rank, 0, sort_index=place)


def metadata(kind: str, pid: int, tid: int, **arguments: Any) -> Event:
    """Return an event that names or orders a process or a track."""
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": arguments}


def span_events(spans: RankSpans, zero_us: float) -> Iterator[Event]:
    """Yield a rank's spans, longer ones first if several begin together."""
    tracks = np.where(np.isin(spans.name, [n for n, name in enumerate(spans.names) if name == "gc"]), _GC, spans.track)
    for track in np.unique(tracks).tolist():
        bucket = spans.buckets.get(track)
        name = _TRACKS.get(track, f"exchange of bucket {track - EXCHANGE}")
        if bucket is not None:
            name += f": {bucket.name}"
        yield metadata("thread_name", spans.rank, track, name=name)
        yield metadata("thread_sort_index", spans.rank, track, sort_index=track)
    order = np.lexsort((-spans.end_us, spans.start_us))
    start = np.round(spans.start_us - zero_us, 3)
    end = np.round(spans.end_us - zero_us, 3)
    for at in order.tolist():
        yield {
            "name": spans.names[spans.name[at]],
            "ph": "X",
            "pid": spans.rank,
            "tid": int(tracks[at]),
            "ts": float(start[at]),
            "dur": float(round(end[at] - start[at], 3)),
            "args": {"step": int(spans.step[at])},
        }


def late_events(tables: Sequence[StepTable], traced: Sequence[RankSpans], zero_us: float) -> Iterator[Event]:
    """Yield a mark in each traced step when the last rank is ready, if the clocks are precise enough."""
    steps = np.unique(np.concatenate([np.empty(0, np.int32), *(spans.step for spans in traced)]))
    for table in tables[-1:]:
        for column in np.flatnonzero(np.isin(table.step, steps)).tolist():
            ready = table.ready_us[:, column]
            last = int(ready.argmax())
            ahead_us = float(ready[last] - np.partition(ready, -2)[-2]) if len(ready) > 1 else 0.0
            if ahead_us <= table.clock_error_us.max() or ready[last] < zero_us:
                continue
            yield {
                "name": f"rank {last} is the last to be ready",
                "ph": "i",
                "s": "t",
                "pid": last,
                "tid": MAIN,
                "ts": float(round(ready[last] - zero_us, 3)),
                "args": {"step": int(table.step[column]), "after the rank before it, us": round(ahead_us, 1)},
            }
