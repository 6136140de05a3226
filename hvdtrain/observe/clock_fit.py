"""Estimate the offset between two clocks from bounds, with an error and without an assumed distribution. Pure.

No rank finishes a collective before all ranks have begun it. Let `offset` convert times of rank r to times of rank 0.
If r has begun a collective at `s` and 0 has finished it at `f`, then ``offset <= f - s``. If 0 has begun it at `s` and
r has finished it at `f`, then ``offset >= s - f``.

The drift between clocks is about constant over minutes. The lines ``offset(t) = a + b t`` that satisfy all bounds form
a polygon. At each time the offset is between the lowest and the highest of these lines.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MAX_DRIFT = 100e-6
"""Of one clock against another: quartz is within 50 ppm. If NTP slews a clock faster, bounds contradict each other."""

KEPT = 64
"""Bounds on each side that are kept unchanged. Of more, only bounds are kept that a line can touch."""

_SPAN_US = 1200e6
"""Age of the oldest bounds used; the drift must be about constant that long."""

_ROUNDING_US = 0.01
"""Rounding error of a double, for times since a boot some months ago."""

_Bounds: TypeAlias = deque[tuple[float, float]]
"""Times on the other clock, and bounds of the offset at these times."""


class Offset(NamedTuple):
    """Microseconds to add to another clock's time, and their largest error."""

    us: float
    error_us: float


class ClockFit:
    """Collects bounds of one clock's offset, and estimates the offset."""

    def __init__(self) -> None:
        self._lower: _Bounds = deque()
        self._upper: _Bounds = deque()

    def at_least(self, time_us: float, offset_us: float) -> None:
        """Add a lower bound of the offset at `time_us` of the other clock."""
        self._add(self._lower, self._upper, time_us, offset_us, 1.0)

    def at_most(self, time_us: float, offset_us: float) -> None:
        """Add an upper bound of the offset at `time_us` of the other clock."""
        self._add(self._upper, self._lower, time_us, offset_us, -1.0)

    def at(self, time_us: float) -> Offset | None:
        """Return the offset at a time of the other clock; None until both sides have a bound."""
        while self._lower and self._upper:
            found = offset_at(time_us, np.array(self._lower), np.array(self._upper))
            if found is not None:
                return found
            # No line fits, because a clock was slewed: drop the oldest bound.
            oldest = self._lower if self._lower[0][0] <= self._upper[0][0] else self._upper
            oldest.popleft()
        return None

    def _add(self, side: _Bounds, other: _Bounds, time_us: float, offset_us: float, sign: float) -> None:
        while other and sign * (offset_us - other[-1][1]) > _max_change(time_us - other[-1][0]) + _ROUNDING_US:
            other.pop()  # no drift explains both: the clock was set, drop earlier bounds
        while side and side[-1][0] <= time_us:
            # Drop bounds that the new one implies at any drift.
            if sign * (offset_us - side[-1][1]) < _max_change(time_us - side[-1][0]):
                break
            side.pop()
        if side and sign * (side[-1][1] - offset_us) >= _max_change(time_us - side[-1][0]):
            return
        side.append((time_us, offset_us))
        if len(side) > KEPT:
            touched = _hull(np.array(side), sign).tolist()
            side.clear()
            side.extend((time, offset) for time, offset in touched[-KEPT // 2 :])
        while len(side) > 1 and side[0][0] < time_us - _SPAN_US:
            side.popleft()


def offset_at(time_us: float, lower: Floats, upper: Floats) -> Offset | None:
    """Return the middle of the possible offsets at `time_us`, and half of their range; None if no line fits.

    `lower` [n, 2] and `upper` [m, 2] are times, as `time_us` by the other clock, and bounds of the offset.
    """
    # Lines a + b t are points (a, b), and a lower bound y is the half-plane ``a + b t >= y``. For accuracy, t is in
    # seconds from `time_us`, b in microseconds per second, and a is relative to the first bound.
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
    limits = np.concatenate([-below[:, 1], above[:, 1], [MAX_DRIFT * 1e6] * 2])
    corners = _corners(normals, limits)
    if not len(corners):
        return None
    low, high = float(corners[:, 0].min()), float(corners[:, 0].max())
    return Offset(origin[1] + (low + high) / 2, (high - low) / 2 + _ROUNDING_US)


def _max_change(after_us: float) -> float:
    """Return the largest change of the offset in this time."""
    return MAX_DRIFT * abs(after_us)


def _hull(points: Floats, sign: float) -> Floats:
    """Return the points that a line above (`sign` 1) or below (-1) all of them can touch."""
    kept: list[tuple[float, float]] = []
    for x, y in sorted(map(tuple, points * [1.0, sign])):
        while len(kept) >= 2 and _turns_left(kept[-2], kept[-1], (x, y)):
            kept.pop()
        kept.append((x, y))
    return np.array(kept) * [1.0, sign]


def _turns_left(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0]) >= 0


def _corners(normals: Floats, limits: Floats) -> Floats:
    """Return the corners [n, 2] of the polygon ``normals @ x <= limits``."""
    i, j = np.triu_indices(len(limits), 1)
    determinant = normals[i, 0] * normals[j, 1] - normals[i, 1] * normals[j, 0]
    crossing = np.abs(determinant) > 1e-12
    i, j, determinant = i[crossing], j[crossing], determinant[crossing]
    a = (limits[i] * normals[j, 1] - limits[j] * normals[i, 1]) / determinant
    b = (normals[i, 0] * limits[j] - normals[j, 0] * limits[i]) / determinant
    found: Floats = np.column_stack([a, b])
    inside: NDArray[np.bool_] = (found @ normals.T <= limits + _ROUNDING_US).all(axis=1)
    return found[inside]
