"""The picture of the step time over a run, as paths of an SVG. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import quantiles
from typing import Any

from hvdtrain.timeline import wording
from hvdtrain.timeline.analysis.analysis import Moment, OverTime
from hvdtrain.timeline.report.page_view import hue

WIDTH, HEIGHT = 1000.0, 160.0
_ROOM = 1.15
_TICKS = 4
_SEEN = 0.002
"""Of a step: a part that never takes more is left out."""


def over_time_view(found: OverTime) -> dict[str, Any]:
    """Return areas of parts from bottom to top, the line of medians, bands, places to point at, and marks."""
    moments = found.moments
    first, last = moments[0].first_step, moments[-1].last_step
    edges = [_x(moment.first_step, first, last) for moment in moments] + [WIDTH]
    most = _top([moment.step_ms for moment in moments])
    names = [n for n in moments[0].parts_ms if any(m.parts_ms[n] > _SEEN * m.step_ms for m in moments)]
    starts = [_x(m.step, first, last) for m in found.marks if m.kind == "start" and first <= m.step <= last]
    below, areas = [0.0] * len(moments), []
    for name in names:
        above = [low + moment.parts_ms[name] for low, moment in zip(below, moments, strict=True)]
        areas.append({"name": name, "hue": hue(name), "path": _area(edges, below, above, most)})
        below = above
    return {
        "areas": areas,
        "median": _line(edges, [moment.median_ms for moment in moments], most),
        "bands": [{"x": x, "width": end - x} for x, end in list(pairwise([*starts, WIDTH]))[1::2]],
        "places": [
            {"x": x, "width": end - x, "step": moment.first_step, "text": _describe(moment, names)}
            for x, end, moment in zip(edges, edges[1:], moments, strict=False)
        ],
        "marks": [
            {"x": _x(mark.step, first, last), "kind": mark.kind, "step": mark.step, "text": mark.text}
            for mark in found.marks
            if first <= mark.step <= last
        ],
        "first": f"{first:,}",
        "last": f"{last:,}",
        "ticks": [_at(moments[number * len(moments) // _TICKS]) for number in range(_TICKS)] + [f"step {last:,}"],
        "top": wording.ms(most),
        "cut": any(moment.step_ms > most for moment in moments),
    }


def _x(step: int, first: int, last: int) -> float:
    return WIDTH * (step - first) / (last - first + 1)


def _top(step_ms: Sequence[float]) -> float:
    """Return the largest value of the axis: few exceptional moments are cut off."""
    usual = quantiles(step_ms, n=50)[-1] if len(step_ms) > 1 else step_ms[0]
    return _ROOM * max(usual, 1e-6)


def _y(value: float, most: float) -> str:
    return f"{HEIGHT * (1 - min(1.0, value / most)):.1f}"


def _line(edges: Sequence[float], values: Sequence[float], most: float) -> str:
    """Return a path that is level between two edges."""
    steps = [f"V{_y(value, most)}H{end:.1f}" for value, end in zip(values, edges[1:], strict=True)]
    return f"M{edges[0]:.1f} {_y(values[0], most)}{''.join(steps)}"


def _area(edges: Sequence[float], below: Sequence[float], above: Sequence[float], most: float) -> str:
    back = [f"V{_y(value, most)}H{begin:.1f}" for value, begin in zip(below[::-1], edges[-2::-1], strict=True)]
    return f"{_line(edges, above, most)}{''.join(back)}Z"


def _at(moment: Moment) -> str:
    after = "" if moment.after_s is None else f", {wording.elapsed(moment.after_s)}"
    return f"step {moment.first_step:,}{after}"


def _describe(moment: Moment, names: Sequence[str]) -> str:
    steps = f"steps {moment.first_step:,} to {moment.last_step:,}"
    if moment.after_s is not None:
        steps += f", from {wording.elapsed(moment.after_s)} on"
    parts = "\n".join(f"{name} {wording.ms(moment.parts_ms[name])} ms" for name in names)
    return f"{steps}\nmean {wording.ms(moment.step_ms)} ms, median {wording.ms(moment.median_ms)} ms\n{parts}"
