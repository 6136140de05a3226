"""Conditions on figures: ``straggler_ms > 5 and exposed_share > 0.2``, or ``loss > 1.01 * base``. Pure."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from operator import eq, ge, gt, le, lt, ne
from typing import NamedTuple

from hvdtrain.errors import ConfigError
from hvdtrain.timeline.analysis.analysis import part_figure
from hvdtrain.timeline.analysis.budget import IDLE, ORDER
from hvdtrain.timeline.analysis.phases import OTHER

_COMPARE = {">=": ge, "<=": le, "==": eq, "!=": ne, ">": gt, "<": lt}
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_CLAUSE = re.compile(rf"\s*([A-Za-z_]\w*)\s*(>=|<=|==|!=|>|<)\s*(?:({_NUMBER})(\s*\*\s*base)?|(base))\s*")
KNOWN = (
    *("goodput", "mfu", "scaling_efficiency", "step_ms", "straggler_ms", "straggler_rank"),
    *("exposed_ms", "exposed_share", "hidden_share", "bus_gb_per_s"),
    *map(part_figure, (*ORDER, OTHER, IDLE)),
)
"""Names of figures."""


class Clause(NamedTuple):
    """One comparison: NAME OP NUMBER, or with `of_base` NAME OP NUMBER * base."""

    name: str
    compare: str
    number: float
    of_base: bool = False

    def __str__(self) -> str:
        return f"{self.name} {self.compare} {self.number:g}{' * base' if self.of_base else ''}"


def parse(text: str, known: Sequence[str] = KNOWN, *, with_base: bool = False) -> list[Clause]:
    """Parse a condition: clauses NAME OP NUMBER, joined by ``and``; `with_base` also allows NAME OP NUMBER * base.

    Errors: ConfigError: wrong syntax, or a name that is not `known`.
    """
    clauses = []
    for piece in re.split(r"\band\b", text):
        found = _CLAUSE.fullmatch(piece)
        if found is None or ((found[4] or found[5]) and not with_base):
            example = "loss > 1.01 * base and seconds > 60" if with_base else "straggler_ms > 5 and step_ms > 100"
            form = "NAME OP NUMBER, or NAME OP NUMBER * base" if with_base else "NAME OP NUMBER"
            raise ConfigError(
                f"invalid --fail_if {text!r}",
                expected=f"{form}, or several joined by `and`, such as '{example}'; "
                f"OP is one of {' '.join(_COMPARE)}; NAME is one of {', '.join(known)}",
                found=repr(piece.strip()),
            )
        if found[1] not in known:
            near = difflib.get_close_matches(found[1], known, 1)
            raise ConfigError(
                f"invalid --fail_if: there is no figure {found[1]!r}",
                expected=f"one of {', '.join(known)}",
                next_step=f"did you mean {near[0]}?" if near else None,
            )
        clauses.append(Clause(found[1], found[2], float(found[3] or 1), bool(found[4] or found[5])))
    return clauses


def holds(clauses: list[Clause], figures: Mapping[str, float], base: Mapping[str, float] | None = None) -> bool:
    """Return whether all clauses are true. Without a straggler, a clause on straggler_rank is false.

    `base` has the figures that clauses with `of_base` refer to.

    Errors: ConfigError: one of the figures is missing, or not a number.
    """
    found = [
        (clause, _figure(clause.name, figures), (_figure(clause.name, base or {}) or 0.0) if clause.of_base else 1.0)
        for clause in clauses
    ]
    return all(value is not None and _COMPARE[c.compare](value, c.number * factor) for c, value, factor in found)


def met_text(clauses: list[Clause], figures: Mapping[str, float]) -> str:
    """Format the figures of clauses that are true."""
    return ", ".join(f"{clause.name} is {_figure(clause.name, figures):.4g} ({clause})" for clause in clauses)


def _figure(name: str, figures: Mapping[str, float]) -> float | None:
    """Return a figure; None for straggler_rank if there is no straggler."""
    if name in figures:
        if math.isnan(figures[name]):
            raise ConfigError(f"{name} of a run is not a number, so that no condition on it can be decided")
        return figures[name]
    if name == "straggler_rank" and "straggler_ms" in figures:
        return None
    raise ConfigError(
        f"this run has no figure {name}",
        expected=f"one of {', '.join(figures) or 'none'}",
        next_step="the report without --fail_if shows what is missing",
    )
