"""A `DataReport` as text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hvdtrain.verify.data import DataReport
from hvdtrain.verify.drawn import Epoch

_MOST = 8
"""Of starts, epochs and notes of a kind."""


def to_text(report: DataReport, run: Path) -> str:
    """A table and the result."""
    rows = [("run", str(run)), ("proven", _proven(report)), ("epochs", _epochs(report))]
    rows += [("starts", _starts(report))]
    if report.left_out:
        ranges = ", ".join(_first([f"{b} to {e - 1}" for b, e in report.left_out]))
        rows.append(("left out", f"positions {ranges}, on purpose: roll backs went past them"))
    rows += _open_end(report)
    rows += [("changed", change) for change in _last(report.past.changes)]
    rows += [("note", note) for note in _first(report.notes)]
    rows += [("WRONG", what) for what in _first([w.what for w in sorted(report.wrong, key=lambda w: w.step)])]
    return "\n".join([*(_row(*row) for row in rows), "", *_table(report), "", _row("result", _result(report))])


def _result(report: DataReport) -> str:
    if report.wrong:
        return "WRONG"
    times = report.epochs.reordered
    if not times:
        return "every sample once, and each rank drew what it should"
    often = "once" if times == 1 else f"{times:,} times"
    return (
        f"every sample once within each order, and each rank drew what it should; data or seed, and with them the"
        f" order, were changed {often}: samples from before a change may have come again after it"
    )


def _first(texts: Sequence[str]) -> list[str]:
    """What is shown of many, and how many are not."""
    return [*texts[:_MOST], *([f"and {len(texts) - _MOST:,} more"] if len(texts) > _MOST else [])]


def _last(texts: Sequence[str]) -> list[str]:
    return [*([f"{len(texts) - _MOST:,} before these"] if len(texts) > _MOST else []), *texts[-_MOST:]]


def _row(name: str, text: str) -> str:
    return f"{name:<11}{text}"


def _proven(report: DataReport) -> str:
    if report.last == report.first:
        return "no step yet"
    text = f"steps {report.first + 1:,} to {report.last:,}, positions {report.position:,} to {report.end - 1:,}"
    return text + (f"; what came before step {report.first + 1:,} is not in this ledger" if report.first else "")


def _epochs(report: DataReport) -> str:
    whole, others = report.epochs.whole, report.epochs.others
    parts = [f"{whole:,} whole, each sample exactly once"] if whole else []
    parts += _last([_epoch(epoch) for epoch in others])
    return "; ".join(parts) or "none"


def _epoch(epoch: Epoch) -> str:
    text = f"epoch {epoch.number}: {epoch.distinct:,} of {epoch.samples:,} samples once"
    if epoch.left_out:
        text += f", {epoch.left_out:,} left out on purpose"
    if epoch.distinct + epoch.left_out < epoch.samples:
        text += " so far" if epoch.is_last else ", then data or seed were changed"
    return text


def _starts(report: DataReport) -> str:
    sizes = [window.start.head.size for window in report.windows]
    shown = [str(size) for number, size in enumerate(sizes) if not number or size != sizes[number - 1]]
    ranks = " -> ".join(shown if len(shown) <= _MOST else ["...", *shown[-_MOST:]])
    text = f"{len(report.starts)}, on {ranks} rank(s)"
    if not report.past.is_there:
        return f"{text}; there is no journal to tell of interruptions"
    text += f"; {report.past.interrupted} interrupted"
    return text + ("; the last has not ended: it goes on, or was killed" if report.past.is_open else "")


def _open_end(report: DataReport) -> list[tuple[str, str]]:
    rows = []
    if report.last > report.durable:
        first = max(report.durable, report.first) + 1
        where = f"step {report.durable:,}" if report.durable else "there is none"
        rows.append(("open", f"steps {first:,} to {report.last:,} are not durable yet: newest checkpoint: {where}"))
    tip = report.windows[-1].start.tip
    if not report.wrong and tip > report.last:
        rows.append(("open", f"of steps {report.last + 1:,} to {tip:,} not all ranks have told yet"))
    return rows


def _table(report: DataReport) -> list[str]:
    counts = {window.start.head.start: window for window in report.windows}
    lines = [f"{'start':>6} {'why':<12}{'ranks':>6}{'after step':>12}{'told to':>12}{'counts to':>12}  host"]
    if (earlier := len(report.starts) - _MOST) > 0:
        lines.append(f"   ... {earlier:,} earlier start(s), checked like these, are not shown")
    for start in report.starts[-_MOST:]:
        head = start.head
        window = counts.get(head.start)
        until = f"{window.last:,}" if window is not None else "-"
        hosts = sorted({other.host for other in start.heads.values()})
        lines.append(
            f"{head.start:>6} {head.why:<12}{head.size:>6}{head.from_step:>12,}{start.tip:>12,}{until:>12}"
            f"  {', '.join(hosts[:3])}"
        )
    return lines
