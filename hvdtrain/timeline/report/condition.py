"""Conditions on the figures of an analysis: ``straggler_ms > 5 and exposed_share > 0.2``. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from operator import eq, ge, gt, le, lt, ne
from typing import NamedTuple

from hvdtrain.errors import ConfigError
from hvdtrain.timeline.analysis.analysis import part_figure
from hvdtrain.timeline.analysis.budget import IDLE, ORDER
from hvdtrain.timeline.analysis.phases import OTHER

_COMPARE = {">=": ge, "<=": le, "==": eq, "!=": ne, ">": gt, "<": lt}
_CLAUSE = re.compile(r"\s*([A-Za-z_]\w*)\s*(>=|<=|==|!=|>|<)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*")
_OF_PARTS = tuple(map(part_figure, (*ORDER, OTHER, IDLE)))
"""Parts of a step. An absent part is 0."""
_OF_STEP = ("step_ms", "straggler_ms", "straggler_rank", "exposed_ms", "exposed_share", "hidden_share", "bus_gb_per_s")
KNOWN = (*_OF_STEP, *_OF_PARTS)
"""Names of figures."""


class Clause(NamedTuple):
    """One comparison: NAME OP NUMBER."""

    name: str
    compare: str
    number: float

    def __str__(self) -> str:
        return f"{self.name} {self.compare} {self.number:g}"


def parse(text: str) -> list[Clause]:
    """Parse a condition: clauses NAME OP NUMBER, joined by ``and``.

    Errors:
        ConfigError: wrong syntax, or an unknown name.
    """
    clauses = []
    for piece in re.split(r"\band\b", text):
        found = _CLAUSE.fullmatch(piece)
        if found is None:
            raise ConfigError(
                f"invalid --fail_if {text!r}",
                expected="NAME OP NUMBER, or several joined by `and`, such as 'straggler_ms > 5 and step_ms > 100'; "
                f"OP is one of {' '.join(_COMPARE)}; NAME is one of {', '.join(KNOWN)}",
                found=repr(piece.strip()),
            )
        if found[1] not in KNOWN:
            near = difflib.get_close_matches(found[1], KNOWN, 1)
            raise ConfigError(
                f"invalid --fail_if: there is no figure {found[1]!r}",
                expected=f"one of {', '.join(KNOWN)}",
                next_step=f"did you mean {near[0]}?" if near else None,
            )
        clauses.append(Clause(found[1], found[2], float(found[3])))
    return clauses


def holds(clauses: list[Clause], figures: Mapping[str, float]) -> bool:
    """Return whether all clauses are true. Without a straggler, a clause on straggler_rank is false.

    Errors:
        ConfigError: this analysis lacks one of the figures.
    """
    found = [(_figure(clause.name, figures), clause) for clause in clauses]
    return all(value is not None and _COMPARE[clause.compare](value, clause.number) for value, clause in found)


def met_text(clauses: list[Clause], figures: Mapping[str, float]) -> str:
    """Format the figures of clauses that are true."""
    return ", ".join(f"{clause.name} is {_figure(clause.name, figures):.4g} ({clause})" for clause in clauses)


def _figure(name: str, figures: Mapping[str, float]) -> float | None:
    """Return a figure; None for straggler_rank if there is no straggler."""
    if name in figures:
        return figures[name]
    if name == "straggler_rank" and "straggler_ms" in figures:
        return None
    if name in _OF_PARTS and "step_ms" in figures:
        return 0.0
    raise ConfigError(
        f"this run has no figure {name}",
        expected=f"one of {', '.join(figures) or 'none'}",
        next_step="hvdtrain timeline report shows what is missing",
    )
