"""Convert times of all ranks to rank 0's clock. Ranks share a clock, or collectives bound its offset.

No rank finishes a collective before all ranks have begun it. Let `offset` convert times of rank r to times of rank 0.
If r has begun a collective at `s` and 0 has finished it at `f`, then ``offset <= f - s``. If 0 has begun it at `s` and
r has finished it at `f`, then ``offset >= s - f``.

The drift between clocks is about constant over minutes. The lines ``offset(t) = a + b t`` that satisfy all bounds form
a polygon. At each time the offset is between the lowest and the highest of these lines.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hvdtrain.comm.base import Comm
from hvdtrain.observe.step_format import Offset

Floats = NDArray[np.float64]

MAX_DRIFT = 100e-6
"""Of one clock against another: quartz is within 50 ppm. If NTP slews a clock faster, bounds contradict each other."""

KEPT = 64
"""Bounds on each side that are kept unchanged. Of more, only bounds are kept that a line can touch."""

_SPAN_US = 1200e6
"""Age of the oldest bounds used; the drift must be about constant that long."""

_ROUNDING_US = 0.01
"""Rounding error of a double, for times since a boot some months ago."""

_Bounds = deque[tuple[float, float]]
"""Times on the other clock, and bounds of the offset at these times."""


class ClockFit:
    """Collects bounds of one clock's offset, and estimates the offset."""

    def __init__(self) -> None:
        self._lower: _Bounds = deque()
        self._upper: _Bounds = deque()

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

    def add(self, sign: float, time_us: float, offset_us: float) -> None:
        """Add a bound of the offset at `time_us` of the other clock: a lower (`sign` 1) or an upper one (-1)."""
        side, other = (self._lower, self._upper) if sign > 0 else (self._upper, self._lower)
        while other and sign * (offset_us - other[-1][1]) > MAX_DRIFT * abs(time_us - other[-1][0]) + _ROUNDING_US:
            other.pop()  # no drift explains both: the clock was set, drop earlier bounds
        while side and side[-1][0] <= time_us:
            # Drop bounds that the new one implies at any drift.
            if sign * (offset_us - side[-1][1]) < MAX_DRIFT * abs(time_us - side[-1][0]):
                break
            side.pop()
        if side and sign * (side[-1][1] - offset_us) >= MAX_DRIFT * abs(time_us - side[-1][0]):
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
    sides = [np.column_stack([np.full(len(hull), s), s * hull[:, 0]]) for hull, s in ((below, -1.0), (above, 1.0))]
    normals = np.concatenate([*sides, [[0.0, 1.0], [0.0, -1.0]]])
    limits = np.concatenate([-below[:, 1], above[:, 1], [MAX_DRIFT * 1e6] * 2])
    # The corners of the polygon ``normals @ x <= limits``:
    i, j = np.triu_indices(len(limits), 1)
    determinant = normals[i, 0] * normals[j, 1] - normals[i, 1] * normals[j, 0]
    crossing = np.abs(determinant) > 1e-12
    i, j, determinant = i[crossing], j[crossing], determinant[crossing]
    a = (limits[i] * normals[j, 1] - limits[j] * normals[i, 1]) / determinant
    b = (normals[i, 0] * limits[j] - normals[j, 0] * limits[i]) / determinant
    corners = np.column_stack([a, b])
    corners = corners[(corners @ normals.T <= limits + _ROUNDING_US).all(axis=1)]
    if not len(corners):
        return None
    low, high = float(corners[:, 0].min()), float(corners[:, 0].max())
    return Offset(origin[1] + (low + high) / 2, (high - low) / 2 + _ROUNDING_US)


def _hull(points: Floats, sign: float) -> Floats:
    """Return the points that a line above (`sign` 1) or below (-1) all of them can touch."""
    kept: list[tuple[float, float]] = []
    for x, y in sorted(map(tuple, points * [1.0, sign])):
        while len(kept) >= 2:
            (a_x, a_y), (b_x, b_y) = kept[-2:]
            if (b_x - a_x) * (y - a_y) - (b_y - a_y) * (x - a_x) < 0:  # a turn to the right
                break
            kept.pop()
        kept.append((x, y))
    return np.array(kept) * [1.0, sign]


AT_START, LATER = 24, 6
"""Probes at the start of a run and later: small all-reduces of about 0.3 ms."""

EVERY_US = 30e6
"""Time between probes: without other bounds, clocks drift apart by some hundred microseconds in it."""

_JITTER_S = 1e-3


@dataclass
class Clocks:
    """Finds offsets to rank 0's clock. One thread may probe while another one asks for offsets."""

    comm: Comm
    ids: Sequence[str]  # of the ranks' clocks (`hvdtrain.runtime.clock.clock_id`); ranks with equal ones share a clock
    now_ns: Callable[[], int] = time.perf_counter_ns  # this rank's clock
    pause: Callable[[float], None] = time.sleep  # sleeps, so that ranks begin probes in different orders

    def __post_init__(self) -> None:
        self._random = random.Random(self.comm.rank)
        ids = self.ids
        self._groups = [[rank for rank, other in enumerate(ids) if other == one] for one in dict.fromkeys(ids)]
        self._group_number = {rank: number for number, group in enumerate(self._groups) for rank in group}
        self._fits = [ClockFit() for _ in self._groups]
        self._last: dict[int, tuple[float, Offset]] = {}
        self._probed_us = -EVERY_US
        self._lock = threading.Lock()

    @property
    def shared(self) -> bool:
        """Whether all ranks have one clock."""
        return len(self._groups) == 1

    @property
    def due(self) -> bool:
        """Whether more probes are due by this rank's clock. The answer of rank 0 counts."""
        return not self.shared and self.now_ns() / 1e3 - self._probed_us >= EVERY_US

    def probe(self, count: int) -> None:
        """Bound the offsets by `count` small all-reduces; nothing where all ranks share a clock. Collective: yes."""
        if self.shared:
            return
        times = torch.empty(1, 2, count, dtype=torch.float64)
        token = torch.zeros(1)
        for number in range(count):
            self.pause(self._random.random() * _JITTER_S)
            times[0, 0, number] = self.now_ns() / 1e3
            self.comm.allreduce(token, name="timeline/probe").wait()
            times[0, 1, number] = self.now_ns() / 1e3
        everyone = self.comm.allgather(times, name="timeline/probes").wait().numpy()
        self._probed_us = self.now_ns() / 1e3
        for number in range(count):
            self.add_bounds(everyone[:, 0, number : number + 1], everyone[:, 1, number : number + 1])

    def add_bounds(self, sent_us: Floats, received_us: Floats) -> None:
        """Add bounds from some consecutive collectives: times [ranks, collectives] by the ranks' own clocks.

        They are before each rank joined, and after each rank had the result.
        """
        ours = self._groups[0]
        for fit, group in zip(self._fits[1:], self._groups[1:], strict=True):
            sent, received = sent_us[group].max(axis=0), received_us[group].min(axis=0)
            most = received_us[ours].min(axis=0) - sent
            least = sent_us[ours].max(axis=0) - received
            with self._lock:
                for sign, times, bounds in ((-1.0, sent, most), (1.0, received, least)):
                    if np.isfinite(bounds).any():
                        best = int(np.nanargmax(sign * bounds))
                        fit.add(sign, float(times[best]), float(bounds[best]))

    def offset(self, rank: int, time_us: float) -> Offset:
        """Return the offset that converts `time_us` of a rank's clock to rank 0's. Infinite error if unknown."""
        number = self._group_number[rank]
        if number == 0:
            return Offset(0.0, 0.0)
        with self._lock:
            found = self._fits[number].at(time_us)
        if found is None:  # bounds contradict each other, a clock was slewed: the last offset with a growing error
            then_us, known = self._last.get(number, (time_us, Offset(0.0, float("inf"))))
            return Offset(known.us, known.error_us + MAX_DRIFT * abs(time_us - then_us))
        self._last[number] = (time_us, found)
        return found
