"""The order of slow tests: which ones to run first where there may not be time for all.

Those first that have not passed for the longest time. Within each age, the longest first, so that no long test is left
for the end. Tests of hosts and schedulers precede all others: one process runs them one after the other, while the
others go on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

OF_HOSTS = ("tests/hosts/", "tests/slurm/")
"""Folders with tests that need other hosts, or a scheduler: all run in one process, so that there is one of each."""


@dataclass(frozen=True)
class Passed:
    """When a slow test last passed.

    Attributes:
        seconds: that it took.
        commit: at which.
    """

    seconds: float
    commit: str


def by_age(passed: Mapping[str, Passed], commits: Sequence[str]) -> list[str]:
    """Return the ids of tests in their order; `commits`: those of `passed`, from the newest to the oldest."""
    age = {commit: number for number, commit in enumerate(commits)}

    def key(name: str) -> tuple[bool, int, float, str]:
        return not name.startswith(OF_HOSTS), -age[passed[name].commit], -passed[name].seconds, name

    return sorted(passed, key=key)
