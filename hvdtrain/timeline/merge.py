"""One trace of all ranks and all sources, for ui.perfetto.dev and chrome://tracing, on one clock.

Of each rank a process: our spans, its exchanges, and torch.profiler's threads and streams below. Of each Timeline of
Horovod a process, under rank 0's, which wrote it. Only the last start of a run is told of.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hvdtrain.errors import TraceError
from hvdtrain.run_layout import RunLayout, TimelineLayout
from hvdtrain.timeline.columns import HorovodTrace
from hvdtrain.timeline.merging import profile, ranks, tensors
from hvdtrain.timeline.merging.sink import Sink, opened
from hvdtrain.timeline.merging.wall_clocks import Clocks, read_clocks
from hvdtrain.timeline.read import read_files, read_horovod
from hvdtrain.timeline.steps import read_steps

_PROFILE = re.compile(r"torch-steps-.*-rank-(\d+)(?:-\d+)?\.json(?:\.gz)?")
_HOROVOD_PIDS = 1 << 20
_EARLIER_US = 60e6
"""What ended longer before this start's first span is of an earlier one."""


@dataclass
class Merged:
    """What a merge made.

    Attributes:
        path: of the trace.
        nbytes: of it.
        events: in it.
        ranks: that have spans or a profile in it.
        timelines: files of Horovod in it.
        profiles: files of torch.profiler in it.
        clock_error_us: by how much the ranks' clocks may be apart; infinite where nothing compared them.
        notes: what is missing or was dropped, in plain words.
    """

    path: Path
    nbytes: int = 0
    events: int = 0
    ranks: Sequence[int] = ()
    timelines: Sequence[Path] = ()
    profiles: Sequence[Path] = ()
    clock_error_us: float = 0.0
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Sources:
    clocks: Clocks
    timelines: Sequence[HorovodTrace]
    profiles: Sequence[tuple[Path, int, profile.Profile]]


def merge(sources: Sequence[Path], out: Path) -> Merged:
    """Write one trace.

    Args:
        sources: a run's folder, or Timelines of Horovod of any program.
        out: the file to write; gzip'd where its name ends in .gz.

    Errors:
        TraceError: there is nothing to merge, a file is of another kind, or `out` cannot be written.
    """
    merged = Merged(out)
    found = _find(sources, merged)
    zero_us = _zero(found)
    try:
        with opened(out) as file:
            sink = Sink(file)
            _write(sink, sources, found, zero_us, merged)
            sink.close({"clock": "microseconds since the first event, by rank 0's clock", "notes": merged.notes})
        merged.nbytes, merged.events = out.stat().st_size, sink.count
    except OSError as error:
        raise TraceError(
            f"the trace {out} cannot be written",
            found=error.strerror or str(error),
            next_step="name another file: -o FILE",
        ) from None
    return merged


def _find(sources: Sequence[Path], merged: Merged) -> _Sources:
    """What there is.

    Errors:
        TraceError: nothing, or nothing that can be read.
    """
    folders = [source for source in sources if source.is_dir()]
    if len(folders) > 1 or (folders and len(sources) > 1):
        raise TraceError(
            "only one run can be merged at a time",
            expected="a run's folder, or Timeline files of Horovod",
            found=" ".join(map(str, sources)),
            next_step="name one folder",
        )
    if not folders:
        traces = read_files(sources)
        for trace in traces:
            _note(trace, merged)
        return _Sources(Clocks(), traces, [])
    timeline = RunLayout(folders[0]).timeline.folder
    folder = timeline if timeline.is_dir() else folders[0]
    clocks = read_clocks(folder)
    begin_us = min((float(s.start_us.min()) for s in clocks.spans if len(s.start_us)), default=-np.inf)
    timelines = []
    for path in sorted(folder.glob("horovod-*.json*")):
        try:
            trace = read_horovod(path)
        except TraceError as error:
            merged.notes.append(f"{path.name} is left out: {error.what}")
            continue
        _note(trace, merged)
        end_us = (trace.epoch_us or 0.0) - clocks.of(0) + float(trace.start_us.max(initial=0.0))
        if trace.epoch_us is not None and end_us < begin_us - _EARLIER_US:
            merged.notes.append(f"{path.name} is of an earlier start and left out")
        elif len(trace.start_us):
            timelines.append(trace)
    profiles = _profiles(folder, clocks, begin_us, merged)
    if not (clocks.spans or timelines or profiles):
        raise TraceError(
            f"there is no trace in {folder}",
            expected="spans-rank-N.json, horovod-steps-*.json or torch-steps-*.json",
            found="none of them",
            next_step="train with --observe.timeline all, or name the run's folder",
        )
    return _Sources(clocks, timelines, profiles)


def _note(trace: HorovodTrace, merged: Merged) -> None:
    merged.notes += [f"{trace.path.name}: {line}" for line in trace.dropped]


def _profiles(folder: Path, clocks: Clocks, begin_us: float, merged: Merged) -> list[tuple[Path, int, profile.Profile]]:
    found = []
    for path in sorted(folder.glob(f"{TimelineLayout.TORCH}*")):
        if not (named := _PROFILE.fullmatch(path.name)):
            continue
        rank = int(named[1])
        try:
            times = profile.look_through(path, merged.notes)
        except OSError as error:
            merged.notes.append(f"{path.name} is left out: it cannot be read: {error.strerror}")
            continue
        if times.first_us is None or times.last_us is None:
            merged.notes.append(f"{path.name} holds no events")
        elif times.base_us + times.last_us - clocks.of(rank) < begin_us - _EARLIER_US:
            merged.notes.append(f"{path.name} is of an earlier start and left out")
        else:
            found.append((path, rank, times))
    return found


def _zero(found: _Sources) -> float:
    """The first moment of all, by rank 0's clock."""
    firsts = [float(spans.start_us.min()) for spans in found.clocks.spans if len(spans.start_us)]
    firsts += [
        _shift(trace, found.clocks) + float(trace.start_us.min()) for trace in found.timelines if len(trace.start_us)
    ]
    firsts += [
        _shift(trace, found.clocks) + float(trace.tick_us.min()) for trace in found.timelines if len(trace.tick_us)
    ]
    firsts += [times.base_us + (times.first_us or 0.0) - found.clocks.of(rank) for _, rank, times in found.profiles]
    return min(firsts, default=0.0)


def _shift(trace: HorovodTrace, clocks: Clocks) -> float:
    return (trace.epoch_us or 0.0) - clocks.of(0)


def _write(sink: Sink, sources: Sequence[Path], found: _Sources, zero_us: float, merged: Merged) -> None:
    """All events."""
    clocks = found.clocks
    hosts = {spans.rank: spans.host for spans in clocks.spans}
    merged.ranks = sorted(hosts.keys() | {rank for _, rank, _ in found.profiles})
    merged.timelines = [trace.path for trace in found.timelines]
    merged.profiles = [path for path, *_ in found.profiles]
    for rank in merged.ranks:
        sink.add(ranks.head(rank, hosts.get(rank, ""), rank + (len(found.timelines) if rank else 0)))
    for spans in clocks.spans:
        sink.add(ranks.span_events(spans, zero_us))
    if clocks.spans:
        sink.add(ranks.late_events(read_steps(sources[0]), clocks.spans, zero_us))
    for number, trace in enumerate(found.timelines):
        title = f"Horovod (rank 0), {trace.path.name}"
        shift_us = _shift(trace, clocks) - zero_us
        sink.add(tensors.horovod_events(trace, _HOROVOD_PIDS + number, title, number + 1, shift_us))
    for path, rank, times in found.profiles:
        sink.add(profile.profile_events(path, rank, times.base_us - clocks.of(rank) - zero_us))
    _tell_clocks(found, merged)


def _tell_clocks(found: _Sources, merged: Merged) -> None:
    """How sure the times are."""
    errors = found.clocks.error_us
    merged.clock_error_us = max(errors.values(), default=0.0)
    if unknown := [rank for rank, error in errors.items() if not np.isfinite(error)]:
        those = f"the clocks of ranks {', '.join(map(str, unknown))}"
        merged.notes.append(f"{those} were never compared with rank 0's: set side by side by their hosts' wall clocks")
    if found.clocks.spans and (found.timelines or found.profiles):
        merged.notes.append(
            "times of Horovod and torch.profiler come by wall clocks: some 0.1 ms from those of the spans, "
            "and more where a clock was set while the job ran"
        )
    if any(trace.epoch_us is None for trace in found.timelines) and (len(found.timelines) > 1 or errors):
        merged.notes.append("a Timeline of Horovod does not say when it began: its times count from 0")
