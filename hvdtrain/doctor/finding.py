"""The result of a check, and texts about several hosts in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hvdtrain.errors import listed

Level = Literal["ok", "warning", "broken"]
LEVELS: tuple[Level, ...] = ("ok", "warning", "broken")
"""Levels from best to worst. The index is the exit status."""
_MOST_NAMES = 6


@dataclass(frozen=True)
class Finding:
    """The result of a check."""

    name: str  # of the check
    level: Level  # broken: training cannot run; warning: it runs slower, or with fewer features
    found: str  # the facts
    why: str = ""  # what is wrong and why it matters, or a note
    fix: str = ""  # the command or the change that fixes it
    minor: bool = False  # while the level is ok, the report shows the name only

    def as_data(self) -> dict[str, Any]:
        """Return the finding as in the JSON report, where ``mend`` is the key of the fix."""
        return {"mend" if name == "fix" else name: value for name, value in vars(self).items()}


def worst(findings: Iterable[Finding]) -> int:
    """Return the exit status: 0 no problem, 1 warnings, 2 something is broken."""
    return max((LEVELS.index(finding.level) for finding in findings), default=0)


def names(hosts: Iterable[str]) -> str:
    """Join names, shortened as in ``a, b and 3 more``."""
    return listed(hosts, _MOST_NAMES)


def by_value(values: Mapping[str, object]) -> str:
    """Group hosts by value, most frequent first: ``2.13 on a, b; 2.12 on c``. A common value has no hosts."""
    hosts: dict[str, list[str]] = {}
    for host, value in values.items():
        hosts.setdefault(str(value) or "none", []).append(host)
    if len(hosts) == 1:
        return next(iter(hosts))
    most_first = sorted(hosts.items(), key=lambda item: -len(item[1]))
    return "; ".join(f"{value} on {names(where)}" for value, where in most_first)
