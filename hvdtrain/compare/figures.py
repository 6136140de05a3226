"""Figures of a comparison for `--fail_if`, and the whole comparison for JSON. Pure."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Literal

from hvdtrain.compare.comparison import Comparison
from hvdtrain.compare.curves import SAMPLES
from hvdtrain.compare.view import letter
from hvdtrain.timeline.report import condition
from hvdtrain.timeline.report.form import dumped

VERSION: Literal[1] = 1


def figures(comparison: Comparison) -> list[dict[str, float]]:
    """Return the known figures of each column, by name.

    Those at equal samples have the name of the loss or metric, those at equal times end with ``_by_seconds``.
    """
    by_place = [
        (re.sub(r"\W", "_", row.figure) + ("" if row.axis == SAMPLES else "_by_seconds"), row.values)
        for row in comparison.rows
    ]
    named = [*by_place, *comparison.costs.items()]
    return [
        {name: value for name, values in named if (value := values[column]) is not None}
        for column in range(len(comparison.columns))
    ]


def met(text: str, comparison: Comparison) -> list[str]:
    """Return, for each column for which a condition is true, the figures that it is about.

    Errors:
        ConfigError: wrong syntax, an unknown name, or a figure that a column lacks.
    """
    base, *others = figures(comparison)
    known = list(dict.fromkeys(name for each in (base, *others) for name in each))
    clauses = condition.parse(text, known, with_base=True)
    found = [number for number, each in enumerate(others, 1) if condition.holds(clauses, each, base)]
    return [f"{letter(number)}: {condition.met_text(clauses, others[number - 1])}" for number in found]


def to_bytes(comparison: Comparison) -> bytes:
    """Return the comparison as JSON text."""
    return dumped({"version": VERSION, "figures": figures(comparison), **asdict(comparison)})
