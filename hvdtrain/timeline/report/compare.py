"""Two analyses beside each other: which differences are no noise. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.timeline import wording
from hvdtrain.timeline.analysis.analysis import Analysis, Estimate
from hvdtrain.timeline.analysis.budget import EXCHANGE, OTHER_EXCHANGE
from hvdtrain.timeline.analysis.phases import PHASES
from hvdtrain.yaml_file import flatten

_NOTHING = Estimate(0.0, 0.0, 0.0)
_SHOWN = 20
_PIECES = (*PHASES, OTHER_EXCHANGE, EXCHANGE)


@dataclass(frozen=True)
class Row:
    """One figure of both.

    Attributes:
        name: a part of the budget, "step", or "late rank".
        a, b: in milliseconds a step.
        difference: b less a, with its 95% confidence interval.
    """

    name: str
    a: Estimate
    b: Estimate
    difference: Estimate

    @property
    def is_noise(self) -> bool:
        """Whether the interval holds 0, or is none: of a single step nobody knows."""
        known = all(each.low < each.high or not each.value for each in (self.a, self.b))
        return not known or self.difference.low <= 0 <= self.difference.high


@dataclass(frozen=True)
class Comparison:
    """What is different between two runs.

    Attributes:
        titles: of both.
        rows: the step, then parts in the order of their budgets.
        options: that differ, by dotted name, each with both values; None where those of one are not known.
        notes: what makes them hard to compare.
    """

    titles: tuple[str, str]
    rows: Sequence[Row]
    options: Mapping[str, tuple[Any, Any]] | None
    notes: Sequence[str]


def compare(a: Analysis, b: Analysis, config_a: Mapping[str, Any], config_b: Mapping[str, Any]) -> Comparison:
    """Compare budgets part by part, what late ranks cost, and options; a config that is empty is one that is not known.

    A difference's interval is that of a difference of two independent means: half widths add as squares.
    """
    rows = []
    if a.budget is not None and b.budget is not None:
        rows.append(_row("step", a.budget.step_ms, b.budget.step_ms))
        of_a, of_b = _alike(*({part.name: part.ms for part in budget.parts} for budget in (a.budget, b.budget)))
        rows += [_row(name, of_a.get(name, _NOTHING), of_b.get(name, _NOTHING)) for name in {**of_a, **of_b}]
    late = [_late(analysis) for analysis in (a, b)]
    if any(each.value for each in late):
        rows.append(_row("late ranks", *late))
    left, right = flatten(config_a), flatten(config_b)
    differ = {
        name: (left.get(name), right.get(name))
        for name in sorted({*left, *right})
        if left.get(name) != right.get(name) and name not in ("run_dir", "resume")
    }
    options = differ if left and right else None
    return Comparison((a.title, b.title), rows, options, list(_notes(a, b)))


def to_text(comparison: Comparison) -> str:
    """Both in columns; a star where the difference is no noise."""
    lines = [f"a: {comparison.titles[0]}", f"b: {comparison.titles[1]}"]
    if comparison.rows:
        lines.append(f"  {'ms a step':<28} {'a':>9} {'b':>9}   b less a")
    for row in comparison.rows:
        places = wording.decimals(max(comparison.rows[0].a.value, comparison.rows[0].b.value))
        change = f"{row.difference.value:+,.{places}f} {wording.interval(row.difference, places)}"
        numbers = f"{wording.ms(row.a.value, places):>9} {wording.ms(row.b.value, places):>9}"
        lines.append(f"{' ' if row.is_noise else '*'} {row.name:<28} {numbers}   {change}")
    if comparison.rows:
        real = sum(not row.is_noise for row in comparison.rows)
        lines.append(f"  * is no noise: its 95% confidence interval leaves 0 out ({real} of {len(comparison.rows)})")
    options = comparison.options
    if options is None:
        lines.append("options: not known of both: a Timeline of Horovod's, or a run without config, says none")
    else:
        lines.append("options that differ:" if options else "options: the same")
        lines += [f"  --{name}  {_told(x)} -> {_told(y)}" for name, (x, y) in list(options.items())[:_SHOWN]]
        if len(options) > _SHOWN:
            lines.append(f"  {len(options) - _SHOWN} more: --json")
    return "\n".join([*lines, *(f"  {note}" for note in comparison.notes)])


def to_plain(comparison: Comparison) -> dict[str, Any]:
    """As plain values, for JSON."""

    def estimate(value: Estimate) -> dict[str, float]:
        return {"value": value.value, "low": value.low, "high": value.high}

    rows = [
        {
            "name": row.name,
            "a": estimate(row.a),
            "b": estimate(row.b),
            "difference": estimate(row.difference),
            "is_noise": row.is_noise,
        }
        for row in comparison.rows
    ]
    options = comparison.options
    return {
        "version": 1,
        "titles": list(comparison.titles),
        "rows": rows,
        "options": None if options is None else {name: list(values) for name, values in options.items()},
        "notes": list(comparison.notes),
    }


def _alike(
    a: Mapping[str, Estimate], b: Mapping[str, Estimate]
) -> tuple[Mapping[str, Estimate], Mapping[str, Estimate]]:
    """Both with the exchange as a whole, where only one has a Timeline of Horovod's that says what it consists of."""
    return (_pooled(a) if EXCHANGE in b else a), (_pooled(b) if EXCHANGE in a else b)


def _pooled(parts: Mapping[str, Estimate]) -> dict[str, Estimate]:
    """The pieces of the exchange as one; its interval is no narrower than it may be."""
    pieces = [ms for name, ms in parts.items() if name in _PIECES]
    rest = {name: ms for name, ms in parts.items() if name not in _PIECES}
    if not pieces:
        return rest
    sums = (sum(getattr(piece, end) for piece in pieces) for end in ("value", "low", "high"))
    return {**rest, EXCHANGE: Estimate(*sums)}


def _row(name: str, a: Estimate, b: Estimate) -> Row:
    middle = b.value - a.value
    low = math.hypot(b.value - b.low, a.high - a.value)
    high = math.hypot(b.high - b.value, a.value - a.low)
    return Row(name, a, b, Estimate(middle, middle - low, middle + high))


def _late(analysis: Analysis) -> Estimate:
    """What the ranks that are late cost together."""
    costs = [row.cost_ms for row in analysis.blame.ranks if row.rank in analysis.blame.late]
    return Estimate(sum(c.value for c in costs), sum(c.low for c in costs), sum(c.high for c in costs))


def _notes(a: Analysis, b: Analysis) -> Iterator[str]:
    if a.size != b.size:
        yield f"a has {a.size} rank(s), b has {b.size}: a step is another thing there if the batch is not the same"
    if a.budget is None or b.budget is None:
        yield f"{'a' if a.budget is None else 'b'} has no steps to be compared"
    elif a.budget.what.startswith("rank 0's") != b.budget.what.startswith("rank 0's"):
        yield "one is a Timeline by itself, whose parts are others"


def _told(value: Any) -> str:
    return "default" if value is None else str(value)[:60]
