"""Sets of intervals on a line: unions, their length, what two of them have in common. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hvdtrain.timeline.columns import Floats

Span = tuple[Floats, Floats]
"""Starts and ends of intervals that do not touch each other, ascending [n]."""

NOTHING: Span = (np.zeros(0), np.zeros(0))


def union(start: Floats, end: Floats) -> Span:
    """Intervals in any order and over each other as a set [n]; those that are empty are left out."""
    good = end > start
    start, end = np.asarray(start, float)[good], np.asarray(end, float)[good]
    if not len(start):
        return NOTHING
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    reach = np.maximum.accumulate(end)
    first = np.concatenate([[True], start[1:] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return start[first], reach[last]


def length(span: Span) -> float:
    """How long a set is in all."""
    return float(np.sum(span[1] - span[0]))


def within(span: Span, start: Floats, end: Floats) -> Floats:
    """How much of a set lies between each start and its end [n]."""
    if not len(span[0]):
        return np.zeros(len(start))
    before = np.concatenate([[0.0], np.cumsum(span[1] - span[0])])

    def until(moments: Floats) -> Floats:
        begun = np.searchsorted(span[0], moments)  # intervals that begin before
        inside = np.clip(span[1][begun - 1] - moments, 0.0, None)
        return np.where(begun > 0, before[begun] - inside, 0.0)

    found: Floats = until(end) - until(start)
    return found


def common(a: Span, b: Span) -> Span:
    """What lies in both sets."""
    if not len(a[0]) or not len(b[0]):
        return NOTHING
    first = np.searchsorted(b[1], a[0], side="right")
    count = np.maximum(0, np.searchsorted(b[0], a[1], side="left") - first)
    of_a = np.repeat(np.arange(len(count)), count)
    of_b = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)
    return union(np.maximum(a[0][of_a], b[0][of_b]), np.minimum(a[1][of_a], b[1][of_b]))


def without(a: Span, b: Span) -> Span:
    """What lies in `a` and not in `b`."""
    if not len(a[0]) or not len(b[0]):
        return a
    gaps = np.concatenate([[-np.inf], b[1]]), np.concatenate([b[0], [np.inf]])
    return common(a, gaps)


def partition(whole: Span, parts: Mapping[str, Span]) -> dict[str, Span]:
    """Cut `whole` into parts: each moment belongs to the first part that holds it, and the rest to "".

    Args:
        whole: what is cut.
        parts: by name, the first first.
    """
    found: dict[str, Span] = {}
    for name, part in parts.items():
        found[name] = common(whole, part)
        whole = without(whole, part)
    return {**found, "": whole}
