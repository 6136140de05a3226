"""What one check found: the value that all checks give."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "broken"]
LEVELS: tuple[Level, ...] = ("ok", "warning", "broken")
"""From good to bad: the index is the exit status."""


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        name: what was looked at.
        level: broken: training cannot run so; warning: it can, with less.
        found: what is there.
        why: what is wrong with it and why that matters, or what to know about it.
        mend: the command or the change that mends it.
        minor: while it is well, nobody needs to read more than its name.
    """

    name: str
    level: Level
    found: str
    why: str = ""
    mend: str = ""
    minor: bool = False


def worst(findings: Iterable[Finding]) -> int:
    """Give the exit status: 0 all is well, 1 warnings, 2 something is broken."""
    return max((LEVELS.index(finding.level) for finding in findings), default=0)
