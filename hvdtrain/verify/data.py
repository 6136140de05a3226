"""Check that every sample of each epoch was used exactly once, over kills, resumes and other numbers of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hvdtrain.errors import RunDirectoryError
from hvdtrain.observe.past_journal import ENDINGS, JournalStart, read_journal_starts, skipped_steps
from hvdtrain.run_layout import RunLayout
from hvdtrain.state.checkpoint_store import CheckpointStore
from hvdtrain.verify.coverage import Wrong, collect_rows, describe_ranges, find_uncovered, find_unrecorded
from hvdtrain.verify.epochs import Epoch, Epochs, check_samples, parts
from hvdtrain.verify.starts import Start, Window, find_disagreement, find_windows, read_starts

_MOST = 8
"""Most starts, epochs and notes of a kind to show."""


@dataclass
class DataReport:
    """The content of a run's ledger, and the errors in it."""

    starts: list[Start]
    windows: list[Window]  # the steps of each start that count
    durable: int  # step of the newest checkpoint
    journal: list[JournalStart] | None  # the starts in the journal; None if there is no journal
    first: int = 0  # the step before the first one in the ledger
    position: int = 0  # the first position in the ledger
    last: int = 0  # the last step that all ranks have recorded
    end: int = 0  # the position after it
    epochs: Epochs = field(default_factory=Epochs)
    left_out: list[tuple[int, int]] = field(default_factory=list)  # ranges of positions that are skipped on purpose
    wrong: list[Wrong] = field(default_factory=list)  # errors, earliest step first
    notes: list[str] = field(default_factory=list)  # other information for the user


def verify_data(run: Path) -> DataReport:
    """Check the ledger of a run, which may still train. Errors: RunDirectoryError: it is missing, or cannot be read."""
    layout = RunLayout(run)
    # In this order, so that what a running job adds meanwhile is at most in what is read later.
    saved = CheckpointStore(layout.checkpoints, lambda text: None).list()
    durable = saved[-1].step if saved else 0
    journal = read_journal_starts(layout.journal) if layout.journal.is_file() else None
    starts, unreadable = read_starts(layout.ledger)
    if not starts:
        raise RunDirectoryError(
            f"{run} contains no ledger",
            expected=f"a file of each host in {layout.ledger}",
            found="no such file" if run.is_dir() else "no such folder",
            next_step="name the folder of a run; every run writes a ledger",
        )
    report = DataReport(starts, find_windows(starts, durable), durable, journal)
    numbers = {start.header.start for start in starts}
    if missing := [str(number) for number in range(max(numbers)) if number not in numbers]:
        report.notes.append(f"no line of start(s) {', '.join(missing)}")
    first = report.windows[0]
    report.first = report.last = first.first
    report.position = report.end = first.start.header.position if first.first else 0
    for window in report.windows:
        found = next(_check(window, report), None)
        if found is not None:
            report.wrong.append(found)
            report.notes += _missing_ranks(window)
            break
    report.epochs.close(is_last=True)
    report.wrong += [
        Wrong(0, f"epoch {epoch.number}: {epoch.used} samples were used, but only {epoch.distinct} different ones")
        for epoch in report.epochs.others
        if epoch.used != epoch.distinct
    ]
    report.wrong += _unexplained_gaps(report)
    # A run that began from another run's state has no steps before the ledger.
    began = [start.first_step for start in journal or () if start.first_step is not None]
    if began and min(began) <= report.first:
        what = f"steps {min(began):,} to {report.first:,} are in the journal, but not in the ledger"
        report.wrong.append(Wrong(1, what))
    if skipped := skipped_steps(journal or ()):
        report.notes.append(
            f"{len(skipped):,} step(s) changed nothing, because the loss or a gradient was not finite: their"
            f" samples count as used; the first is step {min(skipped):,}"
        )
    report.notes += [
        f"{name}: {count} line(s) cut off, as a kill or a full disk leaves them"
        for name, count in unreadable.items()
        if count
    ]
    return report


def _check(window: Window, report: DataReport) -> Iterator[Wrong]:
    """Yield the errors of a window. Add the steps before the first error to the report."""
    header = window.start.header
    if (text := find_disagreement(window.start)) is not None:
        yield Wrong(window.first + 1, text)
    if window.first != report.last:
        yield Wrong(report.last + 1, f"step {report.last + 1}: start {header.start} resumes from step {window.first}")
    if header.position != report.end:
        yield Wrong(
            window.first + 1,
            f"start {header.start} resumes from step {window.first} at position {header.position}, but the steps before"
            f" it ended at position {report.end}",
        )
    if window.first == window.last:
        report.notes += _missing_ranks(window)
        return
    if (wrong := find_unrecorded(window)) is not None:
        yield wrong
    for part in parts(window):
        rows = collect_rows(part)
        if (wrong := find_uncovered(part, rows) or check_samples(part, rows, report.epochs)) is not None:
            yield wrong
        before = np.concatenate([np.array([report.end], np.int64), rows.ends[:-1]])
        gaps = np.flatnonzero(rows.begins > before)
        report.left_out += [(int(before[gap]), int(rows.begins[gap])) for gap in gaps]
        report.last, report.end = part.last, int(rows.ends[-1])


def _missing_ranks(window: Window) -> list[str]:
    start = window.start
    return [
        f"start {start.header.start}: no lines of rank(s) {', '.join(map(str, start.missing))} of {start.header.size};"
        " if the hosts share no file system, copy the ledger/ of each host into that of the run"
    ] * bool(start.missing)


def _unexplained_gaps(report: DataReport) -> list[Wrong]:
    """Find positions that were skipped without a roll back in the journal."""
    if report.journal is None:
        return []
    roll_backs = [event for start in report.journal for event in start.events_named("rolled_back")]
    explained = {p for event in roll_backs if "positions" in event for p in range(*event["positions"])}
    unexplained = np.array([p for b, e in report.left_out for p in range(b, e) if p not in explained], np.int64)
    if not len(unexplained):
        return []
    return [Wrong(0, f"position(s) {describe_ranges(unexplained)} were skipped, but the journal has no roll back")]


def to_text(report: DataReport, run: Path) -> str:
    """Return a table and the result."""
    rows = [("run", str(run)), ("proven", _proven(report)), ("epochs", _epochs(report)), ("starts", _starts(report))]
    if report.left_out:
        ranges = ", ".join(_first([f"{b} to {e - 1}" for b, e in report.left_out]))
        rows.append(("left out", f"positions {ranges}, skipped on purpose by roll backs"))
    rows += _open_end(report)
    events = [event for start in report.journal or () for event in start.events_named("config_changed")]
    rows += [("changed", change) for change in _last([each for event in events for each in event.get("changes", ())])]
    rows += [("note", note) for note in _first(report.notes)]
    rows += [("WRONG", what) for what in _first([w.text for w in sorted(report.wrong, key=lambda w: w.step)])]
    return "\n".join([*(_row(*row) for row in rows), "", *_table(report), "", _row("result", _result(report))])


def _result(report: DataReport) -> str:
    if report.wrong:
        return "WRONG"
    times = report.epochs.reordered
    if not times:
        return "every sample exactly once, and no rank used another rank's samples"
    often = "once" if times == 1 else f"{times:,} times"
    return (
        f"every sample exactly once within each order, and no rank used another rank's samples; data or seed"
        f" changed {often}, which changes the order: samples used before a change may be used again after it"
    )


def _first(texts: Sequence[str]) -> list[str]:
    """Return the first texts, and the number of the others."""
    return [*texts[:_MOST], *([f"and {len(texts) - _MOST:,} more"] if len(texts) > _MOST else [])]


def _last(texts: Sequence[str]) -> list[str]:
    return [*([f"{len(texts) - _MOST:,} before these"] if len(texts) > _MOST else []), *texts[-_MOST:]]


def _row(name: str, text: str) -> str:
    return f"{name:<11}{text}"


def _proven(report: DataReport) -> str:
    if report.last == report.first:
        return "no step yet"
    text = f"steps {report.first + 1:,} to {report.last:,}, positions {report.position:,} to {report.end - 1:,}"
    return text + (f"; this ledger does not contain the steps before {report.first + 1:,}" if report.first else "")


def _epochs(report: DataReport) -> str:
    whole, others = report.epochs.whole, report.epochs.others
    parts = [f"{whole:,} whole, each sample exactly once"] if whole else []
    if report.epochs.iterable:
        parts.append(f"{report.epochs.iterable:,} samples of an iterable data set, each position once")
    parts += _last([_epoch(epoch) for epoch in others])
    return "; ".join(parts) or "none"


def _epoch(epoch: Epoch) -> str:
    source = f" of source {epoch.source}" if epoch.source else ""
    text = f"epoch {epoch.number}{source}: {epoch.distinct:,} of {epoch.samples:,} samples once"
    if epoch.left_out:
        text += f", {epoch.left_out:,} skipped on purpose"
    if epoch.distinct + epoch.left_out < epoch.samples:
        text += " so far" if epoch.is_last else ", then data or seed changed"
    return text


def _starts(report: DataReport) -> str:
    sizes = [window.start.header.size for window in report.windows]
    shown = [str(size) for number, size in enumerate(sizes) if not number or size != sizes[number - 1]]
    ranks = " -> ".join(shown if len(shown) <= _MOST else ["...", *shown[-_MOST:]])
    text = f"{len(report.starts)}, on {ranks} rank(s)"
    if report.journal is None:
        return f"{text}; without a journal, interruptions are unknown"
    # A start without an end was killed, or its ranks changed.
    starts = [start for start in report.journal if start.started]
    ended = [any(event["event"] in ENDINGS for event in start.events) for start in starts]
    text += f"; {ended[:-1].count(False)} interrupted"
    return text + ("; the last has not ended: it is running, or was killed" if ended[-1:] == [False] else "")


def _open_end(report: DataReport) -> Iterator[tuple[str, str]]:
    if report.last > report.durable:
        first = max(report.durable, report.first) + 1
        newest = f"step {report.durable:,}" if report.durable else "none"
        yield "open", f"steps {first:,} to {report.last:,} are not in a checkpoint yet (newest: {newest})"
    tip = report.windows[-1].start.tip
    if not report.wrong and tip > report.last:
        yield "open", f"not all ranks have recorded steps {report.last + 1:,} to {tip:,} yet"


def _table(report: DataReport) -> Iterator[str]:
    counts = {window.start.header.start: window for window in report.windows}
    yield f"{'start':>6} {'why':<12}{'ranks':>6}{'after step':>12}{'recorded to':>12}{'counts to':>12}  host"
    if (earlier := len(report.starts) - _MOST) > 0:
        yield f"   ... {earlier:,} earlier start(s) were checked, too"
    for start in report.starts[-_MOST:]:
        header = start.header
        window = counts.get(header.start)
        until = f"{window.last:,}" if window is not None else "-"
        hosts = sorted({entries.header.host for entries in start.entries.values()})
        yield (
            f"{header.start:>6} {header.why:<12}{header.size:>6}{header.from_step:>12,}{start.tip:>12,}{until:>12}"
            f"  {', '.join(hosts[:3])}"
        )
