"""Which hosts measure at the same time, so that no link is used by two pairs. Pure."""

from __future__ import annotations

MOST_S = 20.0
"""For measuring all of it, about."""
MOST_ROUNDS = 64
"""More would take minutes: of larger clusters each host is measured with so many others."""


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """All pairs of so many, in rounds in which nobody stands twice: a tournament by the circle method.

    Of more than `MOST_ROUNDS` rounds those are left that lie evenly among them.
    """
    if count < 2:
        return []
    places: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    found = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        meet = zip(places[:half], reversed(places[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in meet if a is not None and b is not None])
        places = [places[0], places[-1], *places[1:-1]]
    if len(found) <= MOST_ROUNDS:
        return found
    return [found[number * len(found) // MOST_ROUNDS] for number in range(MOST_ROUNDS)]


def budget_s(count: int) -> float:
    """Seconds that one way between two of so many hosts may be measured, so that all of it takes `MOST_S` at most."""
    return min(1.0, MOST_S / (2 * len(rounds(count)) + 1))
