"""The comparison of the step times of two runs: significant differences of parts, and options. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.compare.comparison import differing_options
from hvdtrain.timeline import wording
from hvdtrain.timeline.analysis.analysis import Analysis, Estimate
from hvdtrain.timeline.analysis.budget import EXCHANGE, OTHER_EXCHANGE
from hvdtrain.timeline.analysis.phases import PHASES
from hvdtrain.yaml_file import flatten

_NOTHING = Estimate(0.0, 0.0, 0.0)
_PIECES = (*PHASES, OTHER_EXCHANGE, EXCHANGE)


@dataclass(frozen=True)
class Row:
    """One figure of both runs, a part of the budget, "step", or "late ranks"; milliseconds per step.

    The difference is b - a, with its 95% confidence interval. It is noise if the interval contains 0, or is unknown as
    for a single step.
    """

    name: str
    a: Estimate
    b: Estimate
    difference: Estimate
    is_noise: bool


@dataclass(frozen=True)
class Comparison:
    """The differences between two runs."""

    titles: tuple[str, str]
    rows: Sequence[Row]  # the step, then parts in the order of the budgets
    options: Mapping[str, Sequence[Any]] | None  # both values by dotted name; None if those of a run are unknown
    notes: Sequence[str]  # why the runs are hard to compare


def compare(a: Analysis, b: Analysis, config_a: Mapping[str, Any], config_b: Mapping[str, Any]) -> Comparison:
    """Compare budgets part by part, the cost of stragglers, and options. An empty config is an unknown one.

    The interval of a difference is that of two independent means: the squares of half widths add up.
    """
    rows = []
    if a.budget is not None and b.budget is not None:
        rows.append(_row("step", a.budget.step_ms, b.budget.step_ms))
        of_a, of_b = ({part.name: part.ms for part in budget.parts} for budget in (a.budget, b.budget))
        of_a, of_b = (_pooled(of_a) if EXCHANGE in of_b else of_a), (_pooled(of_b) if EXCHANGE in of_a else of_b)
        rows += [_row(name, of_a.get(name, _NOTHING), of_b.get(name, _NOTHING)) for name in {**of_a, **of_b}]
    late = [wording.total([row.cost_ms for row in each.blame.ranks if row.rank in each.blame.late]) for each in (a, b)]
    if any(each.value for each in late):
        rows.append(_row("late ranks", *late))
    options = differing_options([flatten(config_a), flatten(config_b)]) if config_a and config_b else None
    return Comparison((a.title, b.title), rows, options, list(_notes(a, b)))


def to_text(comparison: Comparison) -> str:
    """Return both runs in columns; a star marks a significant difference."""
    lines = [f"a: {comparison.titles[0]}", f"b: {comparison.titles[1]}"]
    if rows := comparison.rows:
        places = wording.decimals(max(rows[0].a.value, rows[0].b.value))
        lines.append(f"  {'ms per step':<28} {'a':>9} {'b':>9}   b - a")
        for row in rows:
            change = f"{row.difference.value:+,.{places}f} {wording.interval(row.difference, places)}"
            numbers = f"{wording.ms(row.a.value, places):>9} {wording.ms(row.b.value, places):>9}"
            lines.append(f"{' ' if row.is_noise else '*'} {row.name:<28} {numbers}   {change}")
        real = sum(not row.is_noise for row in rows)
        lines.append(f"  * significant: the 95% confidence interval excludes 0 ({real} of {len(rows)})")
    options = comparison.options
    if options is None:
        lines.append("options: unknown, because a Horovod Timeline or a run without config has none")
    else:
        lines.append("options that differ:" if options else "options: the same")
        for name, values in options.items():
            shown = ("default" if value is None else str(value)[:60] for value in values)
            lines.append(f"  --{name}  {' -> '.join(shown)}")
    return "\n".join([*lines, *(f"  {note}" for note in comparison.notes)])


def _pooled(parts: Mapping[str, Estimate]) -> dict[str, Estimate]:
    """Merge the phases of the exchange into one part, as in a run without phases; with the widest possible interval."""
    pieces = [ms for name, ms in parts.items() if name in _PIECES]
    rest = {name: ms for name, ms in parts.items() if name not in _PIECES}
    return {**rest, EXCHANGE: wording.total(pieces)} if pieces else rest


def _row(name: str, a: Estimate, b: Estimate) -> Row:
    middle = b.value - a.value
    low = math.hypot(b.value - b.low, a.high - a.value)
    high = math.hypot(b.high - b.value, a.value - a.low)
    difference = Estimate(middle, middle - low, middle + high)
    known = all(each.low < each.high or not each.value for each in (a, b))
    return Row(name, a, b, difference, not known or difference.low <= 0 <= difference.high)


def _notes(a: Analysis, b: Analysis) -> Iterator[str]:
    if a.size != b.size:
        yield f"a has {wording.counted(a.size, 'rank')}, b has {b.size}: steps are comparable only with equal batches"
    if a.budget is None or b.budget is None:
        yield f"{'a' if a.budget is None else 'b'} has no steps to compare"
    elif a.budget.what.startswith("rank 0's") != b.budget.what.startswith("rank 0's"):
        yield "one is a Timeline alone, which has other parts"
