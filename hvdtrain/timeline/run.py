"""A run's folder, or Timelines of Horovod, as a trace to be analysed. Reads files; prints nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.errors import ConfigError, TraceError
from hvdtrain.observe.past_journal import JournalStart, read_journal_starts
from hvdtrain.run_layout import RunLayout, TimelineLayout
from hvdtrain.timeline.analysis.phases import extent
from hvdtrain.timeline.columns import HorovodTrace, RankSpans, RunTrace, StepTable
from hvdtrain.timeline.logs import collect_lines, find_logs
from hvdtrain.timeline.read import read_files, read_horovod
from hvdtrain.timeline.span_files import on_one_clock, read_span_files, wall_clock_us
from hvdtrain.timeline.steps import Start, read_starts

_WHAT = "a run's folder (with journal.jsonl), or Timeline files of Horovod"


def load(path: Path, *more: Path, logs: Sequence[Path] = (), most_bytes: float = math.inf) -> RunTrace:
    """Read what a run left, of its last start with stamps; or Timelines of Horovod, one or several segments.

    What is missing or damaged of a run is told in the notes.

    Args:
        path: the run's folder, its timeline/, or a Timeline.
        more: further segments, where `path` is one.
        logs: output of the job, of which Horovod's and NCCL's lines are taken; what lies in the run's folder is found.
        most_bytes: spans, Timelines and output, each, that are read of a run; what would be more is left out and told.

    Errors:
        TraceError: it is neither.
    """
    run, found = _load(path, more, most_bytes)
    output = dict.fromkeys(log.resolve() for log in [*logs, *found])
    return replace(run, warnings=[*run.warnings, *collect_lines(list(output))])


def _load(path: Path, more: Sequence[Path], most_bytes: float) -> tuple[RunTrace, list[Path]]:
    """The trace, and files of output that belong to it."""
    above = RunLayout(path.parent)
    folder = path.parent if path == above.timeline.folder and above.is_run else path
    if folder.is_dir():
        if more:
            raise TraceError("one run at a time", found=f"{path} and {more[0]}", next_step="hvdtrain timeline diff")
        return _load_run(folder, most_bytes)
    if not path.exists():
        raise TraceError(f"{path} does not exist", expected=_WHAT, next_step="ls runs/ shows the runs of this folder")
    traces = read_files([path, *more])
    return RunTrace(path, max(map(_ranks, traces)), horovod=_side_by_side(traces)), []


def _load_run(folder: Path, most_bytes: float) -> tuple[RunTrace, list[Path]]:
    layout = RunLayout(folder)
    timeline = layout.timeline.folder
    if not layout.is_run and not timeline.is_dir():
        here = ", ".join(sorted(each.name for each in folder.iterdir())[:6]) or "nothing"
        raise TraceError(f"{folder} is no run", expected=_WHAT, found=here, next_step="name RUN, as in runs/RUN")
    told = read_journal_starts(layout.journal)
    notes: list[str] = []
    starts = read_starts(timeline) if timeline.is_dir() else []
    start = _newest(starts, told, notes)
    steps = start.steps if start is not None and len(start.steps.step) else None
    notes += start.dropped if start is not None else ()
    is_part = start is not None and steps is not None and (start.at_step > 0 or start is not _first(starts))
    if is_part and steps is not None:
        notes.insert(0, f"all of this is of steps {steps.step[0]} to {steps.step[-1]}: of the run's last round only")
    files = []
    if timeline.is_dir():
        files = read_span_files(timeline, most_bytes, start.number if start is not None and steps is not None else None)
    spans = on_one_clock(files, starts)
    this = _told_of(start, told) if steps is not None else (told or [JournalStart({})])[-1]
    config = this.started.get("config") or _config(layout)
    size = len(start.steps.hosts) if start is not None else len(spans)
    if steps is None:
        size = int(this.started.get("size") or size)
    horovod = list(_segments(timeline, wall_clock_us(files), steps, notes, most_bytes)) if timeline.is_dir() else []
    logs = _small_enough(find_logs(folder, this.started.get("nccl_debug_file")), notes, most_bytes)
    if not (told or starts or files or horovod or logs):
        raise TraceError(
            f"{folder} holds nothing that can be read of a run",
            expected=f"lines in {layout.journal.name}, or files of {timeline.name}/",
            found="they are empty, damaged, or not there",
            next_step="name another run",
        )
    notes += _missing(timeline, size, steps, spans, config)
    link = start.link if start is not None else ()
    machine = this.events_named("machine")
    warnings = [str(event.get("text", "")) for event in this.events_named("warning")]
    run = RunTrace(folder, size, config, steps, spans, horovod, machine, warnings, link, notes, is_part)
    return run, logs


def _first(starts: Sequence[Start]) -> Start | None:
    """The first start that has stamps."""
    return next((start for start in starts if len(start.steps.step)), None)


def _newest(starts: Sequence[Start], told: Sequence[JournalStart], notes: list[str]) -> Start | None:
    """The newest start that has stamps; where none has, the last."""
    found = next((start for start in reversed(starts) if len(start.steps.step)), None)
    if found is None:
        return starts[-1] if starts else None
    if found is not starts[-1] or (told and _told_of(found, told) is not told[-1]):
        notes.append(
            f"the last start left no stamps of steps: told is one before it, of steps"
            f" {found.steps.step[0]} to {found.steps.step[-1]}"
        )
    return found


def _told_of(start: Start | None, told: Sequence[JournalStart]) -> JournalStart:
    """What the journal tells of a start with stamps: the newest of as many ranks that did all of these steps."""
    if start is None or not told:
        return JournalStart({})
    same = [each for each in told if each.started.get("size") in (None, len(start.steps.hosts))] or list(told)
    first, last = int(start.steps.step[0]), int(start.steps.step[-1])
    began = [each for each in same if each.first_step == first]
    did = [each for each in began if each.last_step >= last]
    return (did or began or same)[-1]


def _config(layout: RunLayout) -> Mapping[str, Any]:
    try:
        return layout.read_config()
    except ConfigError:
        return {}


def _segments(
    timeline: Path, wall_us: float | None, steps: StepTable | None, notes: list[str], most_bytes: float
) -> Iterator[HorovodTrace]:
    """Horovod's Timelines of that start, on the run's clock; of other starts they are left out."""
    for path in _small_enough(timeline.glob(TimelineLayout.HOROVOD), notes, most_bytes):
        try:
            trace = read_horovod(path)
        except TraceError as error:
            notes.append(f"{path.name} is left out: {error.what}")
            continue
        if wall_us is None or trace.epoch_us is None:
            notes.append(f"{path.name} is left out: nothing says when it began")
            continue
        moved = _shifted(trace, trace.epoch_us - wall_us)
        begin, end = extent(moved)
        if steps is None or (end >= steps.start_us.min() and begin <= steps.end_us.max()):
            yield moved


def _small_enough(found: Iterable[Path], notes: list[str], most_bytes: float) -> list[Path]:
    """Files that are together no larger, the newest first of all."""
    kept, left = [], most_bytes
    for path in sorted(found, key=lambda each: -each.stat().st_mtime):
        size = path.stat().st_size
        if size > left:
            notes.append(f"{path.name}, {size / 1e6:.0f} MB, is left out here: hvdtrain timeline report reads it")
            continue
        left -= size
        kept.append(path)
    return sorted(kept)


def _shifted(trace: HorovodTrace, shift_us: float) -> HorovodTrace:
    return replace(trace, start_us=trace.start_us + shift_us, tick_us=trace.tick_us + shift_us)


def _side_by_side(traces: Sequence[HorovodTrace]) -> list[HorovodTrace]:
    """Segments on one clock, that of the first, where each says when it began."""
    epochs = [trace.epoch_us for trace in traces]
    known = [epoch for epoch in epochs if epoch is not None]
    if len(known) < len(epochs) or len(known) < 2:
        return list(traces)
    return [_shifted(trace, epoch - known[0]) for trace, epoch in zip(traces, known, strict=True)]


def _ranks(trace: HorovodTrace) -> int:
    return int(np.max(trace.tick_rank, initial=-1)) + 1


def _missing(
    timeline: Path, size: int, steps: StepTable | None, spans: Sequence[RankSpans], config: Mapping[str, Any]
) -> Iterator[str]:
    observe = config.get("observe")
    if isinstance(observe, Mapping) and observe.get("timeline") == "off":
        yield "the run was told to record nothing: --observe.timeline off"
        return
    if steps is None:
        yield "there are no stamps of steps: timeline/steps.jsonl"
    absent = sorted(set(range(size)) - {each.rank for each in spans})
    if absent:
        which = ", ".join(map(str, absent[:8])) + (f" and {len(absent) - 8} more" if len(absent) > 8 else "")
        if TimelineLayout(timeline).spans(absent[0]).exists():
            yield f"spans of rank(s) {which} are large or damaged, and left out: hvdtrain timeline report reads all"
        else:
            yield f"no spans of rank(s) {which}: timeline/spans-rank-N.json, on another host perhaps"
