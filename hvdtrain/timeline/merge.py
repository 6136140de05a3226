"""Merge traces of all ranks and sources on one clock, for ui.perfetto.dev and chrome://tracing.

Each rank is a process with our spans and its exchanges. Each Horovod Timeline is a process below rank 0, which wrote
it. Only the last start of a run is included. Files of torch.profiler are too large to merge, and have ranges with the
names of our spans.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from hvdtrain.errors import TraceError
from hvdtrain.run_layout import RunLayout, TimelineLayout
from hvdtrain.timeline import trace_events
from hvdtrain.timeline.columns import HorovodTrace, RankSpans, StepTable
from hvdtrain.timeline.read import read_files, read_readable
from hvdtrain.timeline.steps import on_one_clock, read_span_files, read_starts, wall_clock_us
from hvdtrain.timeline.trace_events import Event, write_trace

_HOROVOD_PIDS = 1 << 20
_EARLIER_US = 60e6
"""A trace that ended longer before the first span belongs to an earlier start."""


@dataclass(frozen=True)
class Merged:
    """What is merged, and the merged trace: its path, size and number of events."""

    steps: StepTable | None = None
    spans: Sequence[RankSpans] = ()
    timelines: list[HorovodTrace] = field(default_factory=list)  # of Horovod
    notes: list[str] = field(default_factory=list)  # sentences about missing or dropped data
    path: Path = Path()
    nbytes: int = 0
    events: int = 0

    @property
    def ranks(self) -> list[int]:
        """Those with spans."""
        return sorted(spans.rank for spans in self.spans)

    @property
    def clock_error_us(self) -> float:
        """Bound of the difference of the ranks' clocks; infinite if they were never compared."""
        return max((spans.clock_error_us for spans in self.spans), default=0.0)

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
        events = write_trace(out, _events(found, _zero(found)), facts)
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


def _zero(found: Merged) -> float:
    """Return the time of the first event, by rank 0's clock."""
    firsts = [float(spans.start_us.min()) for spans in found.spans if len(spans.start_us)]
    for trace in found.timelines:
        shift_us = found.shift_of(trace)
        firsts += [shift_us + float(times.min()) for times in (trace.start_us, trace.tick_us) if len(times)]
    return min(firsts, default=0.0)


def _events(found: Merged, zero_us: float) -> Iterator[Event]:
    hosts = {spans.rank: spans.host for spans in found.spans}
    for rank in found.ranks:
        name = f"rank {rank} on {hosts[rank]}" if hosts.get(rank) else f"rank {rank}"
        yield from trace_events.labels("process", rank, 0, name, rank + (len(found.timelines) if rank else 0))
    for spans in found.spans:
        yield from trace_events.span_events(spans, zero_us)
    if found.steps is not None:
        yield from trace_events.late_events(found.steps, found.spans, zero_us)
    for number, trace in enumerate(found.timelines):
        title = f"Horovod (rank 0), {trace.path.name}"
        shift_us = found.shift_of(trace) - zero_us
        yield from trace_events.horovod_events(trace, _HOROVOD_PIDS + number, title, number + 1, shift_us)


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
