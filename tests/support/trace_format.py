"""The rules of Google's Trace Event Format that a reader may rely on, checked on a whole trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any


def check_trace(events: Sequence[Mapping[str, Any]]) -> None:
    """See that a trace keeps the format: phases, numbers, B and E in pairs, X spans that nest on each track."""
    assert isinstance(events, list) and events
    tracks: dict[tuple[Any, Any], list[tuple[float, float]]] = {}
    begun: dict[tuple[Any, Any], int] = {}
    for event in events:
        assert isinstance(event, dict) and event["ph"] in "XBEMiIbe", event
        assert isinstance(event["pid"], int), event
        track = (event["pid"], event.get("tid", 0))
        if event["ph"] == "M":
            assert isinstance(event["args"], dict), event
            continue
        assert event["ts"] >= 0, event
        if event["ph"] == "X":
            assert event["name"] and event["dur"] >= 0, event
            tracks.setdefault(track, []).append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] in "BE":
            begun[track] = begun.get(track, 0) + (1 if event["ph"] == "B" else -1)
            assert begun[track] >= 0, f"an E without its B: {event}"
    for spans in tracks.values():
        _check_nesting(spans)


def _check_nesting(spans: list[tuple[float, float]]) -> None:
    slack = 0.002  # times are rounded to nanoseconds of a microsecond
    for (start, end), (later_start, later_end) in pairwise(sorted(spans, key=lambda span: (span[0], -span[1]))):
        outside = later_start >= end - slack
        assert start <= later_start and (outside or later_end <= end + slack), (start, end, later_start, later_end)
