"""The lanes of the page: slices packed for its script, and a summary as a table."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from hvdtrain.timeline.analysis.analysis import Analysis, Lane
from hvdtrain.timeline.report.colours import hue

MOST_SLICES = 50_000
"""In the picture: about 0.6 MB of the page."""

_MOST_LANES = 256
_MOST_NAMES = 10
_US = 1e3  # in a millisecond


def shown_lanes(analysis: Analysis) -> list[Lane]:
    """Return the lanes to show, in order. If there are too many, those of stragglers have priority."""
    late = set(analysis.blame.late)

    def is_of_others(at: int) -> bool:
        found = re.match(r"rank (\d+)\b", analysis.lanes[at].label)
        return found is None or int(found.group(1)) not in late

    kept: list[int] = []
    slices = 0
    for at in sorted(range(len(analysis.lanes)), key=is_of_others):
        count = len(analysis.lanes[at].slices)
        if len(kept) == _MOST_LANES or (kept and slices + count > MOST_SLICES):
            break
        slices += count
        kept.append(at)
    return [analysis.lanes[at] for at in sorted(kept)]


def packed(lanes: Sequence[Lane]) -> dict[str, Any]:
    """Return the data of the script, as numbers that are short in JSON.

    ``names``: [name, hue] by number. ``lanes``: [label, [name, begin, duration, ...], [step, slices of it, ...]]; times
    are whole microseconds, a begin counts from the begin of the slice before. ``end``: of the last slice.
    """
    numbers: dict[str, int] = {}
    found, end = [], 0
    for lane in lanes:
        row: list[int] = []
        steps: list[list[int]] = []
        before = 0
        for one in sorted(lane.slices, key=lambda s: (s.start_ms, -s.end_ms))[:MOST_SLICES]:
            start, until = round(one.start_ms * _US), round(one.end_ms * _US)
            row += [numbers.setdefault(one.name, len(numbers)), start - before, until - start]
            before, end = start, max(end, until)
            if steps and steps[-1][0] == one.step:
                steps[-1][1] += 1
            else:
                steps.append([one.step, 1])
        found.append([lane.label, row, [number for pair in steps for number in pair]])
    return {"names": [[name, hue(name)] for name in numbers], "lanes": found, "end": end}


def summary(lanes: Sequence[Lane]) -> tuple[list[str], list[tuple[str, list[float | None]]]]:
    """Return the names with most time, and for each lane their milliseconds per step."""
    totals: defaultdict[str, float] = defaultdict(float)
    rows = []
    for lane in lanes:
        of_lane: defaultdict[str, float] = defaultdict(float)
        for one in lane.slices:
            of_lane[one.name] += one.end_ms - one.start_ms
        for name, ms in of_lane.items():
            totals[name] += ms
        rows.append((lane.label, of_lane, len({one.step for one in lane.slices}) or 1))
    names = sorted(totals, key=lambda name: (name != "step", -totals[name]))[:_MOST_NAMES]
    return names, [(label, [of[n] / steps if n in of else None for n in names]) for label, of, steps in rows]
