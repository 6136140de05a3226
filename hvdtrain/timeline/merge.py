"""Merge traces of all ranks and sources on one clock, for ui.perfetto.dev and chrome://tracing.

Each rank is a process, with training thread, device and exchanges as tracks. Each Horovod Timeline is a process below
rank 0, which wrote it; tensors that never overlap share a track. Only the last start of a run is included. Files of
torch.profiler are too large to merge, and have ranges with the names of our spans.
"""

from __future__ import annotations

import gzip
import heapq
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import orjson
from numpy.typing import NDArray

from hvdtrain.errors import TraceError
from hvdtrain.files import replacing
from hvdtrain.run_layout import RunLayout, TimelineLayout
from hvdtrain.spans import DEVICE, EXCHANGE, MAIN
from hvdtrain.timeline.columns import HorovodTrace, RankSpans, StepTable
from hvdtrain.timeline.read import read_files, read_readable
from hvdtrain.timeline.steps import on_one_clock, read_span_files, read_starts, wall_clock_us

_HOROVOD_PIDS = 1 << 20
_EARLIER_US = 60e6
"""A trace that ended longer before the first span belongs to an earlier start."""

_Event = Mapping[str, Any]

_TOGETHER = 4096
_LEVEL = 5
"""Of gzip: half the time of the default level, 5% more bytes."""

_GC = 1 << 15
"""Garbage collection has its own track, because one of another thread may overlap a step's begin."""

_CHUNK = 1 << 16
_TRACKS = {MAIN: "training thread", DEVICE: "device", _GC: "garbage collection"}


@dataclass(frozen=True)
class Merged:
    """What is merged, and the merged trace: its path, size and number of events."""

    steps: StepTable | None = None
    spans: Sequence[RankSpans] = ()  # of the ranks, in their order
    timelines: list[HorovodTrace] = field(default_factory=list)  # of Horovod
    notes: list[str] = field(default_factory=list)  # sentences about missing or dropped data
    path: Path = Path()
    nbytes: int = 0
    events: int = 0

    def shift_of(self, trace: HorovodTrace) -> float:
        """Return what is to be added to a Timeline's times; 0 if its start time is unknown and there are no spans."""
        return (trace.epoch_us or 0.0) - (wall_clock_us(self.spans) or 0.0)


def merge(sources: Sequence[Path], out: Path) -> Merged:
    """Write one merged trace of a run's folder, or of Horovod Timelines of any program.

    The file `out` is gzip if its name ends in .gz.

    Errors: TraceError: there is nothing to merge, a file has another format, or `out` cannot be written.
    """
    found = _find(sources)
    found.notes.extend(_clock_notes(found))
    facts = {"clock": "microseconds since the first event, by rank 0's clock", "notes": found.notes}
    try:
        events = _write_trace(out, _events(found), facts)
        nbytes = out.stat().st_size
    except OSError as error:
        raise TraceError(
            f"the trace {out} cannot be written",
            found=error.strerror or str(error),
            next_step="name another file: -o FILE",
        ) from None
    return replace(found, path=out, nbytes=nbytes, events=events)


def _find(sources: Sequence[Path]) -> Merged:
    if not any(source.is_dir() for source in sources):
        traces = read_files(sources)
        return Merged(timelines=traces, notes=[note for trace in traces for note in trace.named_damage])
    if len(sources) > 1:
        raise TraceError(
            "only one run can be merged at a time",
            expected="a run's folder, or Timeline files of Horovod",
            found=" ".join(map(str, sources)),
            next_step="name one folder",
        )
    timeline = RunLayout(sources[0]).timeline.folder
    folder = timeline if timeline.is_dir() else sources[0]
    starts = read_starts(folder)
    stamped = [start.steps for start in starts if len(start.steps.step)]
    found = Merged(stamped[-1] if stamped else None, on_one_clock(read_span_files(folder), starts))
    begin_us = min((float(spans.start_us.min()) for spans in found.spans if len(spans.start_us)), default=-np.inf)
    for trace in read_readable(sorted(folder.glob("horovod-*.json*")), found.notes):
        found.notes.extend(trace.named_damage)
        end_us = found.shift_of(trace) + float(trace.start_us.max(initial=0.0))
        if trace.epoch_us is not None and end_us < begin_us - _EARLIER_US:
            found.notes.append(f"{trace.path.name} is ignored: it belongs to an earlier start")
        elif len(trace.start_us):
            found.timelines.append(trace)
    if any(folder.glob(TimelineLayout.TORCH)):
        found.notes.append(f"{TimelineLayout.TORCH} are not merged: open them in ui.perfetto.dev, one by one")
    if not (found.spans or found.timelines):
        raise TraceError(
            f"there is no trace in {folder}",
            expected="spans-rank-N.json or horovod-steps-*.json",
            found="none of them",
            next_step="train with --observe.timeline all, or name the run's folder",
        )
    return found


def _events(found: Merged) -> Iterator[_Event]:
    firsts = [float(spans.start_us.min()) for spans in found.spans if len(spans.start_us)]
    for trace in found.timelines:
        shift_us = found.shift_of(trace)
        firsts += [shift_us + float(times.min()) for times in (trace.start_us, trace.tick_us) if len(times)]
    zero_us = min(firsts, default=0.0)  # the first event, by rank 0's clock
    for spans in found.spans:
        name = f"rank {spans.rank}{' on ' + spans.host if spans.host else ''}"
        yield from _labels("process", spans.rank, 0, name, spans.rank + (len(found.timelines) if spans.rank else 0))
        yield from _span_events(spans, zero_us)
    if found.steps is not None:
        yield from _late_events(found.steps, found.spans, zero_us)
    for number, trace in enumerate(found.timelines):
        title = f"Horovod (rank 0), {trace.path.name}"
        shift_us = found.shift_of(trace) - zero_us
        yield from _horovod_events(trace, _HOROVOD_PIDS + number, title, number + 1, shift_us)


def _clock_notes(found: Merged) -> Iterator[str]:
    """Yield notes on the precision of the times."""
    if unknown := [spans.rank for spans in found.spans if not np.isfinite(spans.clock_error_us)]:
        clocks = f"the clocks of ranks {', '.join(map(str, unknown))}"
        yield f"{clocks} were never compared with rank 0's: aligned by wall clocks"
    if found.spans and found.timelines:
        yield (
            "Horovod's Timeline is aligned by wall clocks: about 0.1 ms off the spans, "
            "more if a clock was set during the job"
        )
    if any(trace.epoch_us is None for trace in found.timelines) and (len(found.timelines) > 1 or found.spans):
        yield "a Horovod Timeline lacks its start time: its times count from 0"


def _labels(kind: str, pid: int, tid: int, name: str, place: int) -> Iterator[_Event]:
    """Yield the events that name and order a process, or a track of it (kind "thread")."""
    for suffix, arguments in (("name", {"name": name}), ("sort_index", {"sort_index": place})):
        yield {"name": f"{kind}_{suffix}", "ph": "M", "pid": pid, "tid": tid, "args": arguments}


def _span_events(spans: RankSpans, zero_us: float) -> Iterator[_Event]:
    """Yield a rank's spans, longer ones first if several begin together."""
    tracks = np.where(spans.named("gc"), _GC, spans.track)
    for track in np.unique(tracks).tolist():
        bucket = spans.buckets.get(track)
        name = _TRACKS.get(track, f"exchange of bucket {track - EXCHANGE}")
        if bucket is not None:
            name += f": {bucket.name}"
        yield from _labels("thread", spans.rank, track, name, track)
    order = np.lexsort((-spans.end_us, spans.start_us))
    start, end = np.round(spans.start_us - zero_us, 3), np.round(spans.end_us - zero_us, 3)
    for name, tid, step, begin, until in _rows(order, spans.name, tracks, spans.step, start, end):
        times = {"ts": begin, "dur": round(until - begin, 3)}
        yield {"name": spans.names[name], "ph": "X", "pid": spans.rank, "tid": tid, **times, "args": {"step": step}}


def _late_events(table: StepTable, traced: Sequence[RankSpans], zero_us: float) -> Iterator[_Event]:
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


def _horovod_events(trace: HorovodTrace, pid: int, title: str, place: int, shift_us: float) -> Iterator[_Event]:
    """Yield all events of a Timeline as process `pid` at position `place`, with `shift_us` added to their times."""
    yield from _labels("process", pid, 0, title, place)
    track = _tracks(trace)
    names: dict[int, str] = {}
    for tensor, number in enumerate(track.tolist()):
        if number >= 0:
            names[number] = trace.tensors[tensor] if number not in names else "several tensors"
    for number, name in names.items():
        yield from _labels("thread", pid, number, name or "(no name)", number)
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


def _write_trace(path: Path, events: Iterator[_Event], facts: Mapping[str, Any]) -> int:
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
