"""Format a `DataReport` as text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hvdtrain.observe.past_journal import ENDINGS
from hvdtrain.verify.data import DataReport
from hvdtrain.verify.epochs import Epoch

_MOST = 8
"""Most starts, epochs and notes of a kind to show."""


def to_text(report: DataReport, run: Path) -> str:
    """Return a table and the result."""
    rows = [("run", str(run)), ("proven", _proven(report)), ("epochs", _epochs(report)), ("starts", _starts(report))]
    if report.left_out:
        ranges = ", ".join(_first([f"{b} to {e - 1}" for b, e in report.left_out]))
        rows.append(("left out", f"positions {ranges}, skipped on purpose by roll backs"))
    rows += _open_end(report)
    rows += [("changed", change) for change in _last(_changes(report))]
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
    parts += [f"{report.epochs.iterable:,} samples of an iterable data set, each position once"] * bool(
        report.epochs.iterable
    )
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
    open_starts = [
        not any(event["event"] in ENDINGS for event in start.events) for start in report.journal if start.started
    ]
    text += f"; {sum(open_starts[:-1])} interrupted"
    return text + ("; the last has not ended: it is running, or was killed" if open_starts[-1:] == [True] else "")


def _changes(report: DataReport) -> list[str]:
    events = [event for start in report.journal or () for event in start.events_named("config_changed")]
    return [change for event in events for change in event.get("changes", ())]


def _open_end(report: DataReport) -> list[tuple[str, str]]:
    rows = []
    if report.last > report.durable:
        first = max(report.durable, report.first) + 1
        newest = f"step {report.durable:,}" if report.durable else "none"
        rows.append(("open", f"steps {first:,} to {report.last:,} are not in a checkpoint yet (newest: {newest})"))
    tip = report.windows[-1].start.tip
    if not report.wrong and tip > report.last:
        rows.append(("open", f"not all ranks have recorded steps {report.last + 1:,} to {tip:,} yet"))
    return rows


def _table(report: DataReport) -> list[str]:
    counts = {window.start.header.start: window for window in report.windows}
    lines = [f"{'start':>6} {'why':<12}{'ranks':>6}{'after step':>12}{'recorded to':>12}{'counts to':>12}  host"]
    if (earlier := len(report.starts) - _MOST) > 0:
        lines.append(f"   ... {earlier:,} earlier start(s) were checked, too")
    for start in report.starts[-_MOST:]:
        header = start.header
        window = counts.get(header.start)
        until = f"{window.last:,}" if window is not None else "-"
        hosts = sorted({entries.header.host for entries in start.entries.values()})
        lines.append(
            f"{header.start:>6} {header.why:<12}{header.size:>6}{header.from_step:>12,}{start.tip:>12,}{until:>12}"
            f"  {', '.join(hosts[:3])}"
        )
    return lines
