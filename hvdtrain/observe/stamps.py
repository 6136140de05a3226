"""Step stamps from a rank's spans: when a step began, was ready, was released and ended, and its parts. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

from hvdtrain.spans import DEVICE, PARTS, RawEvent

MOMENTS = ("start", "ready", "released", "end", "sent", "received")
"""Points in time. Sent and received bound clock offsets: no rank receives before all ranks have sent."""

DURATIONS = (*PARTS, "gc")
"""Sums over a step. gc overlaps the others."""

COLUMNS = (*MOMENTS, *DURATIONS)

_START, _READY, _RELEASED, _END, _SENT, _RECEIVED = range(len(MOMENTS))
_AT = {name: len(MOMENTS) + number for number, name in enumerate(DURATIONS)}
_ASIDE = {"evaluation", "checkpoint"}


def step_rows(events: Iterable[RawEvent], first: int, count: int) -> list[list[float]]:
    """Return stamps of steps, nanoseconds [count, len(COLUMNS)] by the recorder's clock; NaN if unknown.

    Spans of the device replace those of the host, except for sent and received. A rank without samples sends when the
    step begins.

    Args:
        events: the spans of these steps and of the step before.
        first: number of the first step.
        count: number of steps.
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
    """Replace the host's times and durations by those of the device."""
    for column, its in enumerate(device):
        if its and not math.isnan(its) and column not in (_SENT, _RECEIVED):
            host[column] = its
