"""Choose pairs of hosts that measure at the same time without sharing a link. Pure."""

from __future__ import annotations

MOST_S = 20.0
"""Approximate limit for measuring all links."""
MOST_ROUNDS = 64
"""More rounds of pairs would take minutes. In larger clusters each host is measured with this many others."""


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Return all pairs of `count` hosts in both directions, in rounds where no host occurs twice (circle method).

    If there are more than `MOST_ROUNDS` rounds of pairs, return that many, evenly spread.
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
    if len(found) > MOST_ROUNDS:
        found = [found[number * len(found) // MOST_ROUNDS] for number in range(MOST_ROUNDS)]
    return [way for pairs in found for way in (pairs, [(b, a) for a, b in pairs])]


def budget_s(count: int) -> float:
    """Return seconds for one direction between two of `count` hosts, so that everything takes `MOST_S` at most."""
    return min(1.0, MOST_S / (len(rounds(count)) + 1))
