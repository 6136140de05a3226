"""Read the traces of a run's folder, or Horovod Timelines, for analysis."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.errors import ConfigError, DataError, TraceError
from hvdtrain.observe.cost import as_mapping
from hvdtrain.observe.journal import FORMAT
from hvdtrain.observe.past_journal import JournalStart, read_journal_starts
from hvdtrain.run_layout import RunLayout, TimelineLayout
from hvdtrain.spans import JOURNAL_KEYS
from hvdtrain.timeline import wording
from hvdtrain.timeline.analysis.analyse import ENOUGH
from hvdtrain.timeline.analysis.phases import extent
from hvdtrain.timeline.columns import HorovodTrace, JournalSteps, RankSpans, RunTrace, StampedStart, StepTable
from hvdtrain.timeline.logs import collect_lines, find_logs
from hvdtrain.timeline.read import read_files, read_readable
from hvdtrain.timeline.reading.trace_builder import SPAN, TICK
from hvdtrain.timeline.run_files import RunFiles
from hvdtrain.timeline.steps import Start, on_one_clock, read_span_files, read_starts, wall_clock_us
from hvdtrain.timeline.whatif.evidence import Evidence
from hvdtrain.timeline.whatif.read_run import read_evidence

_MOST_STEPS = 20_000
"""Steps that are read from a journal."""
_MOST_OPERATIONS = 2_000_000
"""Of all Timelines together: more are in memory only while the file is read, which keeps columns on the disk."""
_MOST_RANKS = 1 << 24
"""A journal that says more is damaged."""
_MOST_SPANS = 2_000_000
"""Of all ranks together."""
_EXPECTED = "a run's folder (with journal.jsonl), or Timeline files of Horovod"


def load(
    path: Path, *more: Path, logs: Sequence[Path] = (), most_bytes: float = math.inf, files: RunFiles | None = None
) -> RunTrace:
    """Read a run, of its starts the last one with enough stamps, or one or several segments of a Horovod Timeline.

    The notes list what is missing or damaged.

    Args:
        path: the run's folder, its timeline/, or a Timeline.
        more: further segments if `path` is a Timeline.
        logs: output of the job, for lines of Horovod and NCCL; output in the run's folder is found.
        most_bytes: limit for each of a run's spans, Timelines and output; larger ones are ignored, with a note.
        files: those of the run's folder, kept from an earlier call, so that only what is new is read.

    Errors: TraceError: it is neither a run nor a Timeline.
    """
    folder = run_folder(path)
    if folder.is_dir():
        if more:
            raise TraceError(
                "only one run can be analysed at a time",
                found=f"{path} and {more[0]}",
                next_step="hvdtrain compare",
            )
        return _load_run(files or RunFiles(folder), logs, most_bytes)
    if not path.exists():
        raise TraceError(
            f"{path} does not exist", expected=_EXPECTED, next_step="ls runs/ shows the runs of this folder"
        )
    notes: list[str] = []
    traces = _bounded(read_files([path, *more]), notes)
    size = max(int(np.max(trace.tick_rank, initial=-1)) + 1 for trace in traces)
    return RunTrace(path, size, horovod=_on_first_clock(traces), warnings=collect_lines(logs), notes=notes)


def run_folder(path: Path) -> Path:
    """Return the run's folder for its timeline/; other paths as they are."""
    above = RunLayout(path.parent)
    return path.parent if path == above.timeline.folder and above.is_run else path


def _load_run(files: RunFiles, more_logs: Sequence[Path], most_bytes: float) -> RunTrace:
    layout, folder = files.layout, files.layout.folder
    timeline = layout.timeline.folder
    if not layout.is_run and not timeline.is_dir():
        content = ", ".join(sorted(each.name for each in folder.iterdir())[:6]) or "nothing"
        raise TraceError(
            f"{folder} is not a run",
            expected=_EXPECTED,
            found=content,
            next_step="name a run's folder, such as runs/RUN",
        )
    every, starts = files.starts()
    formats = [start.started.get("format", FORMAT) for start in every]
    past = [start for start, number in zip(every, formats, strict=True) if number == FORMAT]
    wrong = [(number, found) for number, found in enumerate(formats) if found != FORMAT]
    unread = f"this program reads {FORMAT}: it is ignored"
    notes = [f"start {number} of the journal has format {found}, {unread}" for number, found in wrong]
    stamped = [start for start in starts if len(start.steps.step)]
    enough = [start for start in stamped if len(start.steps.step) >= ENOUGH]
    longest = max(stamped, key=lambda start: len(start.steps.step), default=None)
    start = enough[-1] if enough else longest or next(reversed(starts), None)
    steps = start.steps if start is not None and stamped else None
    this, is_part = (past or [JournalStart({})])[-1], False
    number = {id(each): index for index, each in enumerate(past)}
    if start is not None and steps is not None:
        this, which = _journal_of(start, past), f"steps {steps.step[0]} to {steps.step[-1]}"
        is_part = start.at_step > 0 or len(stamped) > 1
        if len(enough) > 1:
            notes.append(f"{len(enough)} starts of the run are analysed; the ranks shown are those of {which}")
        if start is starts[-1] and (not past or this is past[-1]):
            notes += [f"only the last round of the run is analysed: {which}"] if is_part and len(enough) < 2 else []
        else:
            notes.append(f"the last start has too few step stamps: an earlier start is analysed, {which}")
    notes += start.dropped if start is not None else ()
    wanted = start.number if start is not None and stamped else None
    own = files.unless_changed(
        "spans",
        timeline.glob(TimelineLayout.SPANS),
        wanted,
        lambda _: read_span_files(timeline, most_bytes, wanted, _MOST_SPANS),
    )
    if dropped := sum(file.dropped for file in own):
        notes.append(f"the last spans of each rank are analysed: {dropped:,} earlier ones are left out")
    spans = on_one_clock(own, starts)
    config = as_mapping(this.started.get("config"))
    if not config:
        with suppress(ConfigError):
            config = layout.read_config()
    size = len(start.steps.hosts) if start is not None else len(spans)
    if steps is None:
        said = this.started.get("size")
        size = said if isinstance(said, int) and 0 < said < _MOST_RANKS else size
    recorded = [*timeline.glob(TimelineLayout.HOROVOD)]
    if isinstance(mine := this.started.get("horovod_timeline"), str) and Path(mine).is_file():  # by HOROVOD_TIMELINE
        recorded.append(Path(mine))
    traces, found = files.unless_changed("horovod", recorded, None, lambda paths: _read_horovod(paths, most_bytes))
    notes += found
    horovod = _bounded(_segments(traces, wall_clock_us(own), steps, notes), notes)
    outputs = [] if files.grows else find_logs(folder, this.started.get("nccl_debug_file"))
    logs = _small_enough(outputs, notes, most_bytes)
    if not (past or starts or own or horovod or logs):
        raise TraceError(
            f"{folder} has no readable data of a run",
            expected=f"lines in {layout.journal.name}, or files of {timeline.name}/",
            found="they are empty, damaged or missing",
            next_step="name another run",
        )
    notes += _missing(timeline, size, steps, spans, config)
    link = start.link if start is not None else ()
    warnings = [str(event.get("text", "")) for event in this.events_named("warning")]
    warnings += collect_lines([*more_logs, *logs])
    records = files.steps(this, _MOST_STEPS) if past else []
    return RunTrace(
        *(folder, size, config, steps, spans, horovod, warnings, link, notes, is_part),
        starts=past,
        start=this,
        journal=(journal := _journal_steps(records)),
        history=journal if len(past) == 1 else _journal_steps(list(_of_all_starts(files, past))),
        stamped=[(number.get(id(_journal_of(each, past)), -1), each.steps) for each in stamped],
        evidence=lambda: _evidence(folder, this, start, records) if past and this is past[-1] else None,
    )


def read_stamped(folder: Path) -> Iterator[StampedStart]:
    """Yield all starts of a run that have stamps."""
    layout = RunLayout(run_folder(folder))
    past = read_journal_starts(layout.journal)
    for start in read_starts(layout.timeline.folder):
        if len(steps := start.steps.step):
            this = _journal_of(start, past)
            shares, wrong = (
                [event for event in this.events_named(name) if steps[0] <= _at_step(event) <= steps[-1]]
                for name in ("shares", "wrong_rank")
            )
            config, epoch_s = this.started.get("config") or {}, _epoch_s(start.steps, this)
            yield StampedStart(start.steps, shares, config, epoch_s, wrong)


def _epoch_s(steps: StepTable, this: JournalStart) -> float:
    """Return the time since 1970 at time 0 of the stamps, by the end of a step that both know; NaN without one."""
    ends = dict(zip(this.steps, this.first_times, strict=False))
    known = ((ends[step], column) for column, step in enumerate(steps.step.tolist()) if ends.get(step))
    return next((end - float(steps.end_us[0, column]) / 1e6 for end, column in known), math.nan)


def _evidence(
    folder: Path, this: JournalStart, start: Start | None, records: Sequence[Mapping[str, Any]]
) -> Evidence | None:
    chosen = max((_at_step(event) for event in this.events_named("compression_chosen")), default=-1)
    with suppress(ConfigError, DataError):
        return read_evidence(folder, lambda step: step["step"] > chosen, lines=records, start=start)
    return None


def _journal_steps(records: Sequence[Mapping[str, Any]]) -> JournalSteps | None:
    """Return valid lines as columns; None without any. Of a step that occurs twice, the last line counts."""
    absent = {"step_s": math.nan, **dict.fromkeys(JOURNAL_KEYS.values(), 0.0), "tokens": math.nan, "time": math.nan}
    keys, number = tuple(absent), (int, float)
    rows: dict[int, list[float]] = {}
    for record in records:
        if isinstance(step := record.get("step"), int) and isinstance(record.get("step_s"), number):
            rows[step] = [v if isinstance(v := record.get(key), number) else absent[key] for key in keys]
    if not rows:
        return None
    step = np.array(sorted(rows))
    columns = dict(zip(keys, np.array([rows[each] for each in step.tolist()]).T, strict=True))
    parts = {part: 1e3 * columns[key] for part, key in JOURNAL_KEYS.items()}
    return JournalSteps(step, 1e3 * columns["step_s"], parts, columns["tokens"], columns["time"])


def _of_all_starts(files: RunFiles, past: Sequence[JournalStart]) -> Iterator[Mapping[str, Any]]:
    """Yield evenly spread steps of all starts, without those that a later start repeated."""
    total, end = sum(len(start.steps) for start in past), math.inf
    for start in reversed(past):
        most = max(1, _MOST_STEPS * len(start.steps) // max(1, total))
        yield from (each for each in files.steps(start, most) if each.get("step", math.inf) < end)
        end = min(end, start.first_step if start.first_step is not None else math.inf)


def _at_step(event: Mapping[str, Any]) -> int:
    found = event.get("at_step")
    return found if isinstance(found, int) else -1


def _journal_of(start: Start, past: Sequence[JournalStart]) -> JournalStart:
    """Return the journal of a start with stamps: the newest with as many ranks that did all of its steps."""
    if not past:
        return JournalStart({})
    same = [each for each in past if each.started.get("size") in (None, len(start.steps.hosts))] or list(past)
    first, last = int(start.steps.step[0]), int(start.steps.step[-1])
    began = [each for each in same if each.first_step == first]
    did = [each for each in began if each.last_step >= last]
    return (did or began or same)[-1]


def _read_horovod(paths: Iterable[Path], most_bytes: float) -> tuple[list[HorovodTrace], list[str]]:
    """Return Horovod's Timelines, and notes on what is missing."""
    notes: list[str] = []
    return list(read_readable(_small_enough(paths, notes, most_bytes), notes)), notes


def _segments(
    traces: Iterable[HorovodTrace], wall_us: float | None, steps: StepTable | None, notes: list[str]
) -> Iterator[HorovodTrace]:
    """Yield the start's Horovod Timelines, on the run's clock."""
    for trace in traces:
        if wall_us is None or trace.epoch_us is None:
            notes.append(f"{trace.path.name} is ignored: its start time is unknown")
            continue
        moved = _shifted(trace, trace.epoch_us - wall_us)
        begin, end = extent(moved)
        if steps is None or (end >= steps.start_us.min() and begin <= steps.end_us.max()):
            yield moved


def _bounded(traces: Iterable[HorovodTrace], notes: list[str]) -> list[HorovodTrace]:
    """Keep the last operations of each Timeline; together `_MOST_OPERATIONS` at most."""
    found = list(traces)
    most = _MOST_OPERATIONS // max(1, len(found))
    kept = []
    for trace in found:
        left = len(trace.start_us) - most
        if left > 0:
            begin_us = float(trace.start_us[left:].min())
            ticks = slice(int(np.searchsorted(trace.tick_us, begin_us)), None)  # reads few pages of the file
            spans = {name: getattr(trace, name)[left:].copy() for name, _ in SPAN}
            trace = replace(trace, **spans, **{name: getattr(trace, name)[ticks].copy() for name, _ in TICK})
            notes.append(f"{trace.path.name}: the last {most:,} of {left + most:,} operations are analysed")
        kept.append(trace)
    return kept


def _small_enough(found: Iterable[Path], notes: list[str], most_bytes: float) -> list[Path]:
    """Select files up to a total size, the newest first."""
    kept, left = [], most_bytes
    for path in sorted(found, key=lambda each: -each.stat().st_mtime):
        size = path.stat().st_size
        if size > left:
            notes.append(
                f"{path.name}, {size / 1e6:.0f} MB, is too large to read now: hvdtrain timeline report reads it"
            )
            continue
        left -= size
        kept.append(path)
    return sorted(kept)


def _shifted(trace: HorovodTrace, shift_us: float) -> HorovodTrace:
    return replace(trace, start_us=trace.start_us + shift_us, tick_us=trace.tick_us + shift_us)


def _on_first_clock(traces: Sequence[HorovodTrace]) -> list[HorovodTrace]:
    """Move segments onto the clock of the first one, if all have a start time."""
    epochs = [trace.epoch_us for trace in traces]
    known = [epoch for epoch in epochs if epoch is not None]
    if len(known) < len(epochs) or len(known) < 2:
        return list(traces)
    return [_shifted(trace, epoch - known[0]) for trace, epoch in zip(traces, known, strict=True)]


def _missing(
    timeline: Path, size: int, steps: StepTable | None, spans: Sequence[RankSpans], config: Mapping[str, Any]
) -> Iterator[str]:
    if as_mapping(config.get("observe")).get("timeline") == "off":
        yield "the run recorded no traces: --observe.timeline off"
        return
    if steps is None:
        yield "there are no step stamps: timeline/steps.jsonl"
    absent = sorted(set(range(size)) - {each.rank for each in spans})
    if absent:
        which = wording.ranks(absent, most=8)
        if TimelineLayout(timeline).spans(absent[0]).exists():
            yield f"the spans of {which} are too large to read now or damaged: hvdtrain timeline report reads all"
        else:
            yield f"there are no spans of {which}: timeline/spans-rank-N.json may be on another host"
