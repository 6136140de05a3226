"""Conditions on an analysis' figures: ``straggler_ms > 5 and exposed_share > 0.2``. Pure."""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Mapping
from typing import NamedTuple

from hvdtrain.errors import ConfigError

_COMPARE = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
_CLAUSE = re.compile(r"\s*([A-Za-z_]\w*)\s*(>=|<=|==|!=|>|<)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*")
_OF_PARTS = (
    "data_ms",
    "forward_ms",
    "backward_ms",
    "waiting_for_late_ranks_ms",
    "negotiation_ms",
    "queue_ms",
    "fusion_copies_ms",
    "transfer_ms",
    "exchange_ms",
    "other_exchange_ms",
    "optimizer_ms",
    "evaluations_and_checkpoints_ms",
    "rest_ms",
    "other_ms",
    "nothing_under_way_ms",
)
"""Of parts of a step: one that a step does not have is 0."""
KNOWN = (
    "step_ms",
    "straggler_ms",
    "straggler_rank",
    "exposed_ms",
    "exposed_share",
    "hidden_share",
    "bus_gb_per_s",
    *_OF_PARTS,
)
"""Names of figures."""


class Clause(NamedTuple):
    """NAME OP NUMBER."""

    name: str
    compare: str
    number: float

    def __str__(self) -> str:
        return f"{self.name} {self.compare} {self.number:g}"


def parse(text: str) -> list[Clause]:
    """Read a condition: clauses NAME OP NUMBER, joined by ``and``.

    Errors:
        ConfigError: it has another form, or a name that no analysis has.
    """
    clauses = []
    for piece in re.split(r"\band\b", text):
        found = _CLAUSE.fullmatch(piece)
        if found is None:
            raise ConfigError(
                f"{text!r} is no condition",
                expected="NAME OP NUMBER, OP one of > >= < <= == !=; several joined by and",
                found=repr(piece.strip()),
                next_step="--fail_if 'straggler_ms > 5'",
            )
        if found[1] not in KNOWN:
            near = difflib.get_close_matches(found[1], KNOWN, 1, 0.0)
            raise ConfigError(
                f"there is no figure {found[1]!r}",
                expected=", ".join(KNOWN),
                next_step=f"did you mean {near[0]}?",
            )
        clauses.append(Clause(found[1], found[2], float(found[3])))
    return clauses


def holds(clauses: list[Clause], figures: Mapping[str, float]) -> bool:
    """Whether all of them are so. Where nobody is late, no clause on which rank is late is.

    Errors:
        ConfigError: this analysis does not have one of the figures, whatever the other clauses say.
    """
    found = [(_figure(clause.name, figures), clause) for clause in clauses]
    return all(value is not None and _COMPARE[clause.compare](value, clause.number) for value, clause in found)


def told(clauses: list[Clause], figures: Mapping[str, float]) -> str:
    """What was found beside what was asked, of clauses that hold."""
    return ", ".join(f"{clause.name} is {_figure(clause.name, figures):.4g} ({clause})" for clause in clauses)


def _figure(name: str, figures: Mapping[str, float]) -> float | None:
    """None for the late rank's number where it is known that there is none."""
    if name in figures:
        return figures[name]
    if name == "straggler_rank" and "straggler_ms" in figures:
        return None
    if name in _OF_PARTS and "step_ms" in figures:
        return 0.0
    raise ConfigError(
        f"nothing of this run says {name}",
        expected=f"one of {', '.join(figures) or 'none'}",
        next_step="hvdtrain timeline report shows what is missing",
    )
