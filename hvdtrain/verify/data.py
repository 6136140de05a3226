"""Check that every sample of each epoch was used exactly once, over kills, resumes and other numbers of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hvdtrain.errors import RunDirectoryError
from hvdtrain.observe.past_journal import JournalStart, read_journal_starts, skipped_steps
from hvdtrain.run_layout import RunLayout
from hvdtrain.state.checkpoint_store import CheckpointStore
from hvdtrain.verify.coverage import Rows, Wrong, collect_rows, describe_ranges, find_uncovered, find_unrecorded
from hvdtrain.verify.epochs import Epochs, check_samples
from hvdtrain.verify.starts import Start, Window, find_disagreement, find_windows, read_starts


@dataclass
class DataReport:
    """The content of a run's ledger, and the errors in it.

    Attributes:
        windows: the steps of each start that count.
        durable: step of the newest checkpoint.
        journal: the starts in the journal; None if there is no journal.
        first: the step before the first one in the ledger.
        position: the first position in the ledger.
        last: the last step that all ranks have recorded.
        end: the position after it.
        left_out: ranges of positions that are skipped on purpose.
        wrong: errors, earliest step first.
        notes: other information for the user.
    """

    starts: list[Start]
    windows: list[Window]
    durable: int
    journal: list[JournalStart] | None
    first: int = 0
    position: int = 0
    last: int = 0
    end: int = 0
    epochs: Epochs = field(default_factory=Epochs)
    left_out: list[tuple[int, int]] = field(default_factory=list)
    wrong: list[Wrong] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def verify_data(run: Path) -> DataReport:
    """Read and check the ledger of a run, which may still be training.

    Errors:
        RunDirectoryError: there is no ledger, or it cannot be read.
    """
    layout = RunLayout(run)
    # In this order, so that what a running job adds meanwhile is at most in what is read later.
    saved = CheckpointStore(layout.checkpoints, lambda text: None).list()
    durable = saved[-1].step if saved else 0
    journal = read_journal_starts(layout.journal) if layout.journal.is_file() else None
    starts, empty = read_starts(layout.ledger)
    if not starts:
        raise RunDirectoryError(
            f"{run} contains no ledger",
            expected=f"files such as {layout.ledger}/start-0000.rank-00000.jsonl",
            found="no such files" if run.is_dir() else "no such folder",
            next_step="name the folder of a run; every run writes a ledger",
        )
    report = DataReport(starts, find_windows(starts, durable), durable, journal)
    report.notes += [
        f"{path.name} has no first line: its rank was killed before its first step, or the disk was full"
        for path in empty
    ]
    report.notes += _missing_starts(starts)
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
    report.wrong += [*_unexplained_gaps(report), *_missing_first_steps(report)]
    if skipped := skipped_steps(journal or ()):
        report.notes.append(
            f"{len(skipped):,} step(s) changed nothing, because the loss or a gradient was not finite: their"
            f" samples count as used; the first is step {min(skipped):,}"
        )
    report.notes += [
        f"start {s.header.start}, rank {rank}: {e.unreadable} line(s) cut off, as a kill or a full disk leaves them"
        for s in starts
        for rank, e in s.entries.items()
        if e.unreadable
    ]
    return report


def _check(window: Window, report: DataReport) -> Iterator[Wrong]:
    """Yield the errors of a window. Without any, add the window to the report."""
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
    rows = collect_rows(window)
    if (wrong := find_uncovered(window, rows)) is not None:
        yield wrong
    if (wrong := check_samples(window, rows, report.epochs)) is not None:
        yield wrong
    report.left_out += _gaps(report.end, rows)
    report.last, report.end = window.last, int(rows.ends[-1])


def _gaps(position: int, rows: Rows) -> list[tuple[int, int]]:
    before = np.concatenate([np.array([position], np.int64), rows.ends[:-1]])
    gaps = np.flatnonzero(rows.begins > before)
    return [(int(before[gap]), int(rows.begins[gap])) for gap in gaps]


def _missing_ranks(window: Window) -> list[str]:
    start = window.start
    return [
        f"start {start.header.start}: no file of rank(s) {', '.join(map(str, start.missing))} of {start.header.size};"
        " if the hosts share no file system, copy the ledger/ of each host into that of the run"
    ] * bool(start.missing)


def _missing_starts(starts: Sequence[Start]) -> list[str]:
    numbers = {start.header.start for start in starts}
    missing = [str(number) for number in range(max(numbers)) if number not in numbers]
    return [f"no file of start(s) {', '.join(missing)}"] * bool(missing)


def _missing_first_steps(report: DataReport) -> list[Wrong]:
    """Find steps before the ledger that the journal has; a run that began from another run's state has none."""
    began = [start.first_step for start in report.journal or () if start.first_step is not None]
    if not began or min(began) > report.first:
        return []
    return [Wrong(1, f"steps {min(began):,} to {report.first:,} are in the journal, but not in the ledger")]


def _unexplained_gaps(report: DataReport) -> list[Wrong]:
    """Find positions that were skipped without a roll back in the journal."""
    if report.journal is None:
        return []
    roll_backs = [
        event["positions"]
        for start in report.journal
        for event in start.events_named("rolled_back")
        if "positions" in event
    ]
    explained = {position for begin, end in roll_backs for position in range(begin, end)}
    unexplained = np.array([p for b, e in report.left_out for p in range(b, e) if p not in explained], np.int64)
    if not len(unexplained):
        return []
    return [Wrong(0, f"position(s) {describe_ranges(unexplained)} were skipped, but the journal has no roll back")]
