"""A comparison as text for a terminal of 80 columns. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from hvdtrain.compare.comparison import Comparison
from hvdtrain.compare.view import Table, heads, is_significant, letter, tables
from hvdtrain.timeline.report.terminal import shorten

_WIDTH = 80
_LABEL, _CELL = 23, 19
_SIDE_BY_SIDE = 3
"""Columns of a table at most."""
_MOST = 20
"""Lines of a table at most."""


def to_text(comparison: Comparison) -> str:
    """Return tables of three columns at most; the first is always the base."""
    lines = list(_legend(comparison))
    shown = tables(comparison)
    count = len(comparison.columns)
    for first in range(1, count, _SIDE_BY_SIDE - 1):
        columns = [0, *range(first, min(count, first + _SIDE_BY_SIDE - 1))]
        lines.append(_line("", [heads(comparison)[column] for column in columns]))
        for table in shown:
            lines += _table(table, columns)
    if any(is_significant(each) for row in comparison.rows for each in row.differences):
        lines.append("* significant: the 95% interval excludes 0")
    for note in comparison.notes:
        lines += textwrap.wrap(note, _WIDTH, initial_indent="note: ", subsequent_indent="  ")
    return "\n".join(lines)


def _legend(comparison: Comparison) -> Iterator[str]:
    for number, (runs, state) in enumerate(zip(comparison.columns, comparison.states, strict=True)):
        more = f" and {len(runs) - 1} of other seeds" if len(runs) > 1 else ""
        tail = f"{more}: {state}"
        yield shorten(f"{letter(number)}: {shorten(runs[0], max(12, _WIDTH - 3 - len(tail)))}{tail}", _WIDTH)


def _table(table: Table, columns: Sequence[int]) -> Iterator[str]:
    yield shorten(table.title, _WIDTH)
    for line in table.lines[:_MOST]:
        cells = [shorten(line.cells[column], _CELL - 1) for column in columns]
        if len(line.label) > _LABEL - 3:
            yield f"  {shorten(line.label, _WIDTH - 2)}"
            yield _line("", cells)
        else:
            yield _line(f"  {line.label}", cells)
    if len(table.lines) > _MOST:
        yield f"  {len(table.lines) - _MOST} more: --json"


def _line(label: str, cells: Sequence[str]) -> str:
    return f"{label:<{_LABEL}}{''.join(f'{cell:>{_CELL}}' for cell in cells)}".rstrip()
