"""Sets of intervals: union, length, intersection, difference. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hvdtrain.timeline.columns import Floats

Span = tuple[Floats, Floats]
"""Starts and ends of disjoint intervals, ascending [n]."""

NOTHING: Span = (np.zeros(0), np.zeros(0))


def union(start: Floats, end: Floats) -> Span:
    """Return the union of intervals in any order; empty ones are dropped."""
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
    """Return the total length."""
    return float(np.sum(span[1] - span[0]))


def within(span: Span, start: Floats, end: Floats) -> Floats:
    """Return the length of a set between each start and its end [n]."""
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
    """Return the intersection."""
    if not len(a[0]) or not len(b[0]):
        return NOTHING
    first = np.searchsorted(b[1], a[0], side="right")
    count = np.maximum(0, np.searchsorted(b[0], a[1], side="left") - first)
    of_a = np.repeat(np.arange(len(count)), count)
    of_b = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)
    return union(np.maximum(a[0][of_a], b[0][of_b]), np.minimum(a[1][of_a], b[1][of_b]))


def without(a: Span, b: Span) -> Span:
    """Return the difference `a` minus `b`."""
    if not len(a[0]) or not len(b[0]):
        return a
    gaps = np.concatenate([[-np.inf], b[1]]), np.concatenate([b[0], [np.inf]])
    return common(a, gaps)


def partition(whole: Span, parts: Mapping[str, Span]) -> dict[str, Span]:
    """Split `whole`: each moment belongs to the first of `parts` that contains it, else to ""."""
    found: dict[str, Span] = {}
    for name, part in parts.items():
        found[name] = common(whole, part)
        whole = without(whole, part)
    return {**found, "": whole}
