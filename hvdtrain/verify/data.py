"""Whether every sample of each epoch was taken exactly once, over kills, resumes and other numbers of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hvdtrain.errors import RunDirectoryError
from hvdtrain.run_layout import RunLayout
from hvdtrain.state.checkpoint_store import CheckpointStore
from hvdtrain.verify.coverage import Rows, Wrong, rows_of, spans, uncovered, untold
from hvdtrain.verify.drawn import Epochs, check_drawn
from hvdtrain.verify.journal_starts import Past, read_past
from hvdtrain.verify.starts import Start, Window, disagreement, read_starts, windows


@dataclass
class DataReport:
    """What the ledger of a run says.

    Attributes:
        starts: all of them.
        windows: what counts.
        durable: step of the newest checkpoint.
        past: what the journal says.
        first: the step that the ledger begins after.
        position: the position that it begins at.
        last: the last step that all ranks tell of.
        end: the position behind it.
        epochs: what was taken of each.
        left_out: ranges of positions on purpose.
        wrong: what does not hold, the first step first.
        notes: what else a person should know.
    """

    starts: list[Start]
    windows: list[Window]
    durable: int
    past: Past
    first: int = 0
    position: int = 0
    last: int = 0
    end: int = 0
    epochs: Epochs = field(default_factory=Epochs)
    left_out: list[tuple[int, int]] = field(default_factory=list)
    wrong: list[Wrong] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def verify_data(run: Path) -> DataReport:
    """Read the ledger of a run, which may be going on, and check it.

    Errors:
        RunDirectoryError: there is no ledger, or it cannot be read.
    """
    layout = RunLayout(run)
    # In this order: what a run that goes on writes meanwhile is then never missed in what is read later.
    saved = CheckpointStore(layout.checkpoints, lambda text: None).list()
    durable = saved[-1].step if saved else 0
    past = read_past(layout.journal)
    starts, empty = read_starts(layout.ledger)
    if not starts:
        raise RunDirectoryError(
            f"{run} holds no ledger",
            expected=f"files such as {layout.ledger}/start-0000.rank-00000.jsonl",
            next_step="give the folder of a run; every run writes one",
        )
    report = DataReport(starts, windows(starts, durable), durable, past)
    report.notes += [
        f"{path.name} has no first line: its rank was killed before its first step, or the disk was full"
        for path in empty
    ]
    report.notes += _gaps(starts)
    first = report.windows[0]
    report.first = report.last = first.first
    report.position = report.end = first.start.head.position if first.first else 0
    for window in report.windows:
        found = next(_check(window, report), None)
        if found is not None:
            report.wrong.append(found)
            report.notes += _missing(window)
            break
    report.epochs.end()
    report.wrong += _unequal(report.epochs)
    report.wrong += _unexplained(report)
    report.notes += _unread(starts)
    return report


def _check(window: Window, report: DataReport) -> Iterator[Wrong]:
    """What does not hold in a window, one after the other; goes on where it does."""
    head = window.start.head
    if (text := disagreement(window.start)) is not None:
        yield Wrong(window.first + 1, text)
    if window.first != report.last:
        yield Wrong(report.last + 1, f"step {report.last + 1}: start {head.start} goes on from step {window.first}")
    if head.position != report.end:
        yield Wrong(
            window.first + 1,
            f"start {head.start} goes on from step {window.first} at position {head.position}, but the steps before it"
            f" ended at position {report.end}",
        )
    if window.first == window.last:
        report.notes += _missing(window)
        return
    if (wrong := untold(window)) is not None:
        yield wrong
    rows = rows_of(window)
    if (wrong := uncovered(window, rows)) is not None:
        yield wrong
    if (wrong := check_drawn(window, rows, report.epochs)) is not None:
        yield wrong
    report.left_out += _holes(report.end, rows)
    report.last, report.end = window.last, int(rows.ends[-1])


def _holes(position: int, rows: Rows) -> list[tuple[int, int]]:
    before = np.concatenate([np.array([position], np.int64), rows.ends[:-1]])
    gaps = np.flatnonzero(rows.begins > before)
    return [(int(before[gap]), int(rows.begins[gap])) for gap in gaps]


def _missing(window: Window) -> list[str]:
    start = window.start
    return [
        f"start {start.head.start}: no file of rank(s) {', '.join(map(str, start.missing))} of {start.head.size}: where"
        " hosts share no file system, copy the ledger/ of each into that of the run"
    ] * bool(start.missing)


def _gaps(starts: Sequence[Start]) -> list[str]:
    there = {start.head.start for start in starts}
    gone = [str(number) for number in range(max(there)) if number not in there]
    return [f"no file of start(s) {', '.join(gone)}"] * bool(gone)


def _unequal(epochs: Epochs) -> list[Wrong]:
    return [
        Wrong(0, f"epoch {epoch.number}: {epoch.taken} samples were taken, but only {epoch.distinct} different ones")
        for epoch in epochs.others
        if epoch.taken != epoch.distinct
    ]


def _unexplained(report: DataReport) -> list[Wrong]:
    """Positions that were passed over without a roll back in the journal."""
    if not report.past.is_there:
        return []
    gone = {position for begin, end in report.past.gone for position in range(begin, end)}
    unknown = np.array([p for b, e in report.left_out for p in range(b, e) if p not in gone], np.int64)
    if not len(unknown):
        return []
    return [Wrong(0, f"position(s) {spans(unknown)} were left out, but the journal knows of no roll back")]


def _unread(starts: Sequence[Start]) -> list[str]:
    found = [(s.head.start, rank, e.unreadable) for s in starts for rank, e in s.entries.items() if e.unreadable]
    return [
        f"start {start}, rank {rank}: {lines} line(s) cut off, as a kill or a full disk leaves them"
        for start, rank, lines in found
    ]
