"""A comparison as tables of text cells, as text for a terminal of 80 columns, as JSON, and for --fail_if."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from hvdtrain.compare.comparison import STEPS, Comparison, Row
from hvdtrain.compare.read import SAMPLES
from hvdtrain.observe import cost
from hvdtrain.observe.output import duration
from hvdtrain.timeline.analysis.analysis import Estimate
from hvdtrain.timeline.report import condition
from hvdtrain.timeline.report.form import dumped
from hvdtrain.timeline.report.terminal import shorten

_LABELS = {"loss": "training loss", "heldout_loss": "held-out loss"}
_COSTS = {"seconds": "time of training", "device_hours": "device-hours", "energy_kwh": "energy, kWh", "money": "money",
          "late_percent": "% later than promised"}  # fmt: skip
_UNKNOWN = "-"

_WIDTH = 80
_LABEL, _CELL = 23, 19
_SIDE_BY_SIDE = 3
"""Columns of a table at most."""
_MOST = 20
"""Lines of a table at most."""


_Line = tuple[str, list[str]]
"""A line of a table: its label, and a cell for each column of the comparison."""


def _letter(column: int) -> str:
    """Return the short name of a column: a to z, then a1."""
    return chr(ord("a") + column % 26) + (str(column // 26) if column >= 26 else "")


def _tables(comparison: Comparison) -> dict[str, list[_Line]]:
    """Return the tables by title: figures by place, cost, and what differs."""
    found: dict[str, list[_Line]] = {}
    for row in comparison.rows:
        found.setdefault(_place(row), []).extend(_figure(row))
    costs = [(_COSTS[name], [_cost(name, value) for value in values]) for name, values in comparison.costs.items()]
    several = any(len(runs) > 1 for runs in comparison.columns)
    found[f"cost of the whole run{', mean over runs' if several else ''}"] = costs
    for title, kind, prefix in (
        ("options that differ", comparison.options, "--"),
        ("versions that differ", comparison.versions, ""),
        ("machines that differ", comparison.machines, ""),
    ):
        lines = [(f"{prefix}{name}", [_plain(value, prefix) for value in values]) for name, values in kind.items()]
        found[title if lines else f"{title}: none"] = lines
    return found


def is_significant(difference: Estimate | None) -> bool:
    """Return whether a difference has an interval that excludes 0."""
    return difference is not None and difference.low < difference.high and not difference.low <= 0 <= difference.high


def _place(row: Row) -> str:
    if row.axis == STEPS:
        return "milliseconds of a step, and minus base"
    where = f"{row.place:,.0f} samples" if row.axis == SAMPLES else f"{_time(row.place)} of training"
    if not row.window:
        return f"at {where}"
    return f"at {where}, mean over the last {f'{row.window:,.0f}' if row.axis == SAMPLES else _time(row.window)}"


def _figure(row: Row) -> Iterator[_Line]:
    if row.axis == STEPS:
        places = 1 if max(value or 0.0 for value in row.values) >= 10 else 2
        yield row.figure, [_step(*each, places) for each in zip(row.values, row.differences, strict=True)]
        return
    yield _LABELS.get(row.figure, row.figure), [_value(value) for value in row.values]
    if any(row.differences):
        cells = [f"{each.value:+.3g}{'*' if is_significant(each) else ''}" if each else "" for each in row.differences]
        yield "  minus base", cells
    intervals = [_interval(each) for each in row.differences]
    if any(intervals):
        yield "  95% interval", intervals


def _step(value: float | None, difference: Estimate | None, places: int) -> str:
    if value is None:
        return _UNKNOWN
    change = f" {difference.value:+,.{places}f}{'*' * is_significant(difference)}" if difference else ""
    return f"{value:,.{places}f}{change}"


def _interval(estimate: Estimate | None) -> str:
    if estimate is None or not (math.isfinite(estimate.low) and math.isfinite(estimate.high)):
        return ""
    return f"{estimate.low:.2g} .. {estimate.high:.2g}"


def _value(value: float | None) -> str:
    if value is None:
        return _UNKNOWN
    return f"{value:,.4f}" if abs(value) < 1000 else f"{value:,.1f}"


def _cost(name: str, value: float | None) -> str:
    if value is None:
        return "not measured" if name == "energy_kwh" else "no price" if name == "money" else _UNKNOWN
    return _time(value) if name == "seconds" else cost.money(value) if name == "money" else cost.number(value)


def _time(seconds: float) -> str:
    return duration(seconds) if seconds >= 60 else f"{seconds:.2f} s"


def _plain(value: Any, prefix: str) -> str:
    if value is None:
        return "default" if prefix else "unknown"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(str, value)) or "none"
    return str(dict(value)) if isinstance(value, Mapping) else str(value)


def to_text(comparison: Comparison) -> str:
    """Return tables of three columns at most; the first is always the base."""
    lines = []
    for number, (runs, state) in enumerate(zip(comparison.columns, comparison.states, strict=True)):
        tail = f"{f' and {len(runs) - 1} of other seeds' if len(runs) > 1 else ''}: {state}"
        lines.append(shorten(f"{_letter(number)}: {shorten(runs[0], max(12, _WIDTH - 3 - len(tail)))}{tail}", _WIDTH))
    tables, count = _tables(comparison), len(comparison.columns)
    for first in range(1, count, _SIDE_BY_SIDE - 1):
        columns = [0, *range(first, min(count, first + _SIDE_BY_SIDE - 1))]
        lines.append(_line("", [f"{_letter(column)}{'' if column else ' (base)'}" for column in columns]))
        for title, rows in tables.items():
            lines += _shown(title, rows, columns)
    if any(is_significant(each) for row in comparison.rows for each in row.differences):
        lines.append("* significant: the 95% interval excludes 0")
    for note in comparison.notes:
        lines += textwrap.wrap(note, _WIDTH, initial_indent="note: ", subsequent_indent="  ")
    return "\n".join(lines)


def _shown(title: str, lines: Sequence[_Line], columns: Sequence[int]) -> Iterator[str]:
    yield shorten(title, _WIDTH)
    for label, every in lines[:_MOST]:
        cells = [shorten(every[column], _CELL - 1) for column in columns]
        if len(label) > _LABEL - 3:
            yield f"  {shorten(label, _WIDTH - 2)}"
            yield _line("", cells)
        else:
            yield _line(f"  {label}", cells)
    if len(lines) > _MOST:
        yield f"  {len(lines) - _MOST} more: --json"


def _line(label: str, cells: Sequence[str]) -> str:
    return f"{label:<{_LABEL}}{''.join(f'{cell:>{_CELL}}' for cell in cells)}".rstrip()


def _figures(comparison: Comparison) -> list[dict[str, float]]:
    """Return the known figures of each column, by name.

    Those at equal samples have the name of the loss or metric, those at equal times end with ``_by_seconds``, and those
    of step times with ``_ms``.
    """
    ends = {SAMPLES: "", STEPS: "_ms"}
    places = [re.sub(r"\W", "_", row.figure) + ends.get(row.axis, "_by_seconds") for row in comparison.rows]
    by_place = zip(places, [row.values for row in comparison.rows], strict=True)
    named = [*by_place, *comparison.costs.items()]
    return [
        {name: value for name, values in named if (value := values[column]) is not None}
        for column in range(len(comparison.columns))
    ]


def met(text: str, comparison: Comparison) -> list[str]:
    """Return, for each column for which a condition is true, the figures that it is about.

    Errors: ConfigError: wrong syntax, an unknown name, or a figure that a column lacks.
    """
    base, *others = _figures(comparison)
    known = list(dict.fromkeys(name for each in (base, *others) for name in each))
    clauses = condition.parse(text, known, with_base=True)
    found = [number for number, each in enumerate(others, 1) if condition.holds(clauses, each, base)]
    return [f"{_letter(number)}: {condition.met_text(clauses, others[number - 1])}" for number in found]


def to_bytes(comparison: Comparison) -> bytes:
    """Return the comparison as JSON text."""
    return dumped({"version": 1, "figures": _figures(comparison), **asdict(comparison)})
