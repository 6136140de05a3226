"""Several who have numbers summed over ranks in each step, as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Summed(Protocol):
    """Has numbers that each step sums over ranks."""

    def notices(self) -> list[int]:
        """Numbers of this rank, always as many."""
        ...

    def agreed(self, step: int, notices: Sequence[int]) -> None:
        """Take their sums. Collective: yes."""
        ...


class CombinedSums:
    """Asks each in turn and gives each its own sums."""

    def __init__(self, *members: Summed) -> None:
        self._members = members
        self._counts: list[int] = []

    def notices(self) -> list[int]:
        """Those of all."""
        found = [member.notices() for member in self._members]
        self._counts = [len(numbers) for numbers in found]
        return [number for numbers in found for number in numbers]

    def agreed(self, step: int, notices: Sequence[int]) -> None:
        """Give each its own. Collective: yes."""
        rest = list(notices)
        for member, count in zip(self._members, self._counts, strict=True):
            own, rest = rest[:count], rest[count:]
            member.agreed(step, own)
