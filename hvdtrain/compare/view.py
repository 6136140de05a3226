"""A comparison as tables of text cells, for the terminal and the page. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.compare.comparison import Comparison, Row
from hvdtrain.compare.curves import SAMPLES
from hvdtrain.observe import cost
from hvdtrain.observe.progress import duration
from hvdtrain.timeline.analysis.analysis import Estimate

_LABELS = {"loss": "training loss", "heldout_loss": "held-out loss"}
_COSTS = {"seconds": "time of training", "device_hours": "device-hours", "energy_kwh": "energy, kWh", "money": "money"}
_UNKNOWN = "-"


@dataclass(frozen=True)
class Line:
    """A line of a table: a cell for each column of the comparison, and what its bar shows, if it has one."""

    label: str
    cells: Sequence[str]
    differences: Sequence[Estimate | None] = ()


@dataclass(frozen=True)
class Table:
    """A table with its title."""

    title: str
    lines: Sequence[Line]


def letter(column: int) -> str:
    """Return the short name of a column: a to z, then a1."""
    return chr(ord("a") + column % 26) + (str(column // 26) if column >= 26 else "")


def heads(comparison: Comparison) -> list[str]:
    """Return the heads of the columns."""
    return [f"{letter(n)} (base)" if n == 0 else letter(n) for n in range(len(comparison.columns))]


def tables(comparison: Comparison) -> list[Table]:
    """Return the tables: figures by place, cost, and what differs."""
    found: dict[str, list[Line]] = {}
    for row in comparison.rows:
        found.setdefault(_place(row), []).extend(_figure(row))
    made = [Table(title, lines) for title, lines in found.items()]
    costs = [Line(_COSTS[name], [_cost(name, value) for value in values]) for name, values in comparison.costs.items()]
    several = any(len(runs) > 1 for runs in comparison.columns)
    made.append(Table(f"cost of the whole run{', mean over runs' if several else ''}", costs))
    for title, kind, prefix in (
        ("options that differ", comparison.options, "--"),
        ("versions that differ", comparison.versions, ""),
        ("machines that differ", comparison.machines, ""),
    ):
        lines = [Line(f"{prefix}{name}", [_plain(value, prefix) for value in values]) for name, values in kind.items()]
        made.append(Table(title if lines else f"{title}: none", lines))
    return made


def is_significant(difference: Estimate | None) -> bool:
    """Return whether a difference has an interval that excludes 0."""
    return difference is not None and difference.low < difference.high and not difference.low <= 0 <= difference.high


def _place(row: Row) -> str:
    where = f"{row.place:,.0f} samples" if row.axis == SAMPLES else f"{_time(row.place)} of training"
    if not row.window:
        return f"at {where}"
    return f"at {where}, mean over the last {f'{row.window:,.0f}' if row.axis == SAMPLES else _time(row.window)}"


def _figure(row: Row) -> Iterator[Line]:
    yield Line(_LABELS.get(row.figure, row.figure), [_value(value) for value in row.values])
    if any(row.differences):
        marks = ["*" if is_significant(each) else "" for each in row.differences]
        cells = [f"{each.value:+.3g}{mark}" if each else "" for each, mark in zip(row.differences, marks, strict=True)]
        yield Line("  minus base", cells, row.differences)
    intervals = [_interval(each) for each in row.differences]
    if any(intervals):
        yield Line("  95% interval", intervals)


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
