"""Stamps of steps, taken from a rank's spans: when it began, was ready, was released, ended, and its parts. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

from hvdtrain.spans import DEVICE, PARTS, RawEvent

MOMENTS = ("start", "ready", "released", "end", "sent", "received")
"""Points in time, of which sent and received bound the clocks of ranks: none has received before all have sent."""

DURATIONS = (*PARTS, "gc")
"""Sums over a step; gc lies inside of the others."""

COLUMNS = (*MOMENTS, *DURATIONS)

_START, _READY, _RELEASED, _END, _SENT, _RECEIVED = range(len(MOMENTS))
_AT = {name: len(MOMENTS) + number for number, name in enumerate(DURATIONS)}
_ASIDE = {"evaluation", "checkpoint"}


def step_rows(events: Iterable[RawEvent], first: int, count: int) -> list[list[float]]:
    """Nanoseconds [count, len(COLUMNS)] of the steps from `first` on, by the recorder's clock; NaN where unknown.

    Where the device has spans of its own they stand in the place of the host's, but for sent and received. A rank
    without samples of its own sends from the beginning.

    Args:
        events: the spans of these steps, and of the one before.
        first: number of the first step.
        count: of steps.
    """
    host = {step: [math.nan] * len(MOMENTS) + [0.0] * len(DURATIONS) for step in range(first, first + count)}
    device: dict[int, list[float]] = {}
    for name, track, start_ns, end_ns, step in events:
        if track > DEVICE:
            continue
        if name in _ASIDE:
            if step + 1 in host:
                host[step + 1][_AT["aside"]] += end_ns - start_ns
            continue
        row = host.get(step)
        if row is None:
            continue
        if track == DEVICE:
            row = device.setdefault(step, [math.nan] * len(MOMENTS) + [0.0] * len(DURATIONS))
        if name in _AT:
            row[_AT[name]] += end_ns - start_ns
            if name == "backward":
                row[_SENT] = end_ns
            elif name == "wait":
                row[_READY], row[_RELEASED], row[_RECEIVED] = start_ns, end_ns, end_ns
        elif name == "step":
            row[_START], row[_END] = start_ns, end_ns
    for step, row in device.items():
        _replace(host[step], row)
    for row in host.values():
        if row[_SENT] != row[_SENT]:
            row[_SENT] = row[_START]
    return [*host.values()]


def _replace(host: list[float], device: list[float]) -> None:
    """Put the device's times and durations into a row of the host's."""
    for column, its in enumerate(device):
        if its and not math.isnan(its) and column not in (_SENT, _RECEIVED):
            host[column] = its
