"""Stamps of steps, taken from a rank's spans: when it began, was ready, was released, ended, and its parts. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

from hvdtrain.spans import DEVICE, MAIN, PARTS, RawEvent

MOMENTS = ("start", "ready", "released", "end", "sent", "received")
"""Points in time, of which sent and received bound the clocks of ranks: none has received before all have sent."""

DURATIONS = (*PARTS, "gc")
"""Sums over a step; gc lies inside of the others."""

COLUMNS = (*MOMENTS, *DURATIONS)

_START, _READY, _RELEASED, _END, _SENT, _RECEIVED = range(len(MOMENTS))
_AT = {name: len(MOMENTS) + number for number, name in enumerate(DURATIONS)}
_ASIDE = {"evaluation", "checkpoint"}


def step_rows(events: Iterable[RawEvent], first: int, count: int) -> list[list[float]]:
    """Microseconds [count, len(COLUMNS)] of the steps from `first` on, by the recorder's clock; NaN where unknown.

    Where the device has spans of its own they stand in the place of the host's, but for sent and received. A rank
    without samples of its own sends from the beginning.

    Args:
        events: the spans of these steps, and of the one before.
        first: number of the first step.
        count: of steps.
    """
    host = [[math.nan] * len(MOMENTS) + [0.0] * len(DURATIONS) for _ in range(count)]
    device: dict[int, list[float]] = {}
    for name, track, start_ns, end_ns, step in events:
        number = step - first
        if track > DEVICE or not -1 <= number < count:
            continue
        if name in _ASIDE:
            if number + 1 < count:
                host[number + 1][_AT["aside"]] += end_ns - start_ns
            continue
        if number < 0:
            continue
        row = host[number] if track == MAIN else device.setdefault(number, [math.nan] * len(COLUMNS))
        column = _AT.get(name)
        if column is not None:
            known = row[column]
            row[column] = end_ns - start_ns + (0.0 if math.isnan(known) else known)
            if name == "wait":
                row[_READY], row[_RELEASED] = start_ns, end_ns
                row[_RECEIVED] = end_ns
            elif name == "backward":
                row[_SENT] = end_ns
        elif name == "step":
            row[_START], row[_END] = start_ns, end_ns
    for row in host:
        if math.isnan(row[_SENT]):
            row[_SENT] = row[_START]
    for number, row in device.items():
        kept = host[number][_SENT], host[number][_RECEIVED]
        host[number] = [mine if math.isnan(its) else its for mine, its in zip(host[number], row, strict=True)]
        host[number][_SENT], host[number][_RECEIVED] = kept
    return [[value / 1e3 for value in row] for row in host]
