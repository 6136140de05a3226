"""How far one clock is ahead of another, from bounds alone: no distribution is assumed, and the error is stated. Pure.

A collective is over on no rank before all have begun it. So of the offset to be added to rank r's times to have rank
0's, what r has begun at `s` and 0 has finished at `f` says ``offset <= f - s``; the other way round it says
``offset >= s - f``.
Clocks drift apart at a rate that is about constant over minutes: what fits between all bounds is a polygon of lines
``offset(t) = a + b t``, and at each time the offset is between its lowest and its highest.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MAX_DRIFT = 100e-6
"""Of one clock against another: quartz is within 50 ppm. Where NTP slews one by more, bounds contradict each other."""

KEPT = 64
"""Bounds of each side that are kept as they came; of more, those that a line can touch."""


_ROUNDING_US = 0.01
"""A double's, of times since a boot some months ago."""


_Bounds: TypeAlias = deque[tuple[float, float]]
"""Times by the other clock, and bounds of the offset then."""


class Offset(NamedTuple):
    """To be added to another clock's microseconds, and by how much it may be wrong."""

    us: float
    error_us: float


class ClockFit:
    """Bounds of the offset of one clock, as they come, and what they say.

    Args:
        max_drift: how fast the offset may change at most.
        span_us: how far back bounds are looked at: as long as the drift is about constant.
    """

    def __init__(self, max_drift: float = MAX_DRIFT, span_us: float = 1200e6) -> None:
        self._max_drift = max_drift
        self._span_us = span_us
        self._lower: _Bounds = deque()
        self._upper: _Bounds = deque()

    def at_least(self, time_us: float, offset_us: float) -> None:
        """At `time_us` of the other clock the offset is not smaller than this."""
        self._add(self._lower, self._upper, time_us, offset_us, 1.0)

    def at_most(self, time_us: float, offset_us: float) -> None:
        """At `time_us` of the other clock the offset is not larger than this."""
        self._add(self._upper, self._lower, time_us, offset_us, -1.0)

    def at(self, time_us: float) -> Offset | None:
        """The offset at a time of the other clock; None as long as one of the sides has no bound."""
        while self._lower and self._upper:
            found = offset_at(time_us, _points(self._lower), _points(self._upper), self._max_drift)
            if found is not None:
                return found
            # Not one line any more: a clock was slewed. What is oldest no longer holds.
            oldest = self._lower if self._lower[0][0] <= self._upper[0][0] else self._upper
            oldest.popleft()
        return None

    def _add(self, side: _Bounds, other: _Bounds, time_us: float, offset_us: float, sign: float) -> None:
        while other and sign * (offset_us - other[-1][1]) > self._most(time_us - other[-1][0]) + _ROUNDING_US:
            other.pop()  # no drift explains both: the clock was set, and what was before is over
        while side and side[-1][0] <= time_us:
            # One that is implied by the new one, whatever the drift, adds nothing.
            if sign * (offset_us - side[-1][1]) < self._most(time_us - side[-1][0]):
                break
            side.pop()
        if side and sign * (side[-1][1] - offset_us) >= self._most(time_us - side[-1][0]):
            return
        side.append((time_us, offset_us))
        if len(side) > KEPT:
            touched = _hull(_points(side), sign).tolist()
            side.clear()
            side.extend((time, offset) for time, offset in touched[-KEPT // 2 :])
        while len(side) > 1 and side[0][0] < time_us - self._span_us:
            side.popleft()

    def _most(self, after_us: float) -> float:
        """By how much the offset may change in this time."""
        return self._max_drift * abs(after_us)


def offset_at(time_us: float, lower: Floats, upper: Floats, max_drift: float) -> Offset | None:
    """The middle of what is possible at `time_us`, and half of its width; None where no line fits.

    Args:
        time_us: of the other clock.
        lower: times and the offsets not below which it is then [n, 2].
        upper: times and the offsets not above which it is then [m, 2].
        max_drift: the line's slope at most.
    """
    # Lines a + b t as points (a, b): half-planes ``a + b t >= y`` of the bounds below; t in seconds from `time_us`,
    # b in microseconds a second, a from some offset on: numbers that a double holds well.
    origin = [time_us, float(lower[0, 1])]
    below = _hull((lower - origin) * [1e-6, 1.0], 1.0)
    above = _hull((upper - origin) * [1e-6, 1.0], -1.0)
    normals = np.concatenate(
        [
            np.column_stack([-np.ones(len(below)), -below[:, 0]]),
            np.column_stack([np.ones(len(above)), above[:, 0]]),
            [[0.0, 1.0], [0.0, -1.0]],
        ]
    )
    limits = np.concatenate([-below[:, 1], above[:, 1], [max_drift * 1e6] * 2])
    corners = _corners(normals, limits)
    if not len(corners):
        return None
    low, high = float(corners[:, 0].min()), float(corners[:, 0].max())
    return Offset(origin[1] + (low + high) / 2, (high - low) / 2 + _ROUNDING_US)


def _points(side: _Bounds) -> Floats:
    return np.array(side, dtype=np.float64)


def _hull(points: Floats, sign: float) -> Floats:
    """Those of the points that a line above (`sign` 1) or below (-1) all of them may touch."""
    kept: list[tuple[float, float]] = []
    for x, y in sorted(map(tuple, points * [1.0, sign])):
        while len(kept) >= 2 and _turns_left(kept[-2], kept[-1], (x, y)):
            kept.pop()
        kept.append((x, y))
    return np.array(kept) * [1.0, sign]


def _turns_left(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0]) >= 0


def _corners(normals: Floats, limits: Floats) -> Floats:
    """Corners [n, 2] of the polygon ``normals @ x <= limits``."""
    i, j = np.triu_indices(len(limits), 1)
    determinant = normals[i, 0] * normals[j, 1] - normals[i, 1] * normals[j, 0]
    crossing = np.abs(determinant) > 1e-12
    i, j, determinant = i[crossing], j[crossing], determinant[crossing]
    a = (limits[i] * normals[j, 1] - limits[j] * normals[i, 1]) / determinant
    b = (normals[i, 0] * limits[j] - normals[j, 0] * limits[i]) / determinant
    found: Floats = np.column_stack([a, b])
    inside: NDArray[np.bool_] = (found @ normals.T <= limits + _ROUNDING_US).all(axis=1)
    return found[inside]
