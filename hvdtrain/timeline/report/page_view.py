"""What the page's templates cannot compute: shares of bars, heat, commands in texts, colours, paths of SVG. Pure.

Colours are cool for work, warm for waiting, amber for input, grey for the rest.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise
from statistics import median, quantiles
from typing import Any

from hvdtrain.timeline import wording
from hvdtrain.timeline.analysis import budget, goodput
from hvdtrain.timeline.analysis.analysis import Blame, OverTime

MOST_RANKS = 100
"""Rows of ranks: the most costly, and all stragglers."""

SEEN_MS = 0.0005
"""Shorter times are not shown."""
_HEAT = (0.005, 0.02, 0.05)
"""Differences from the median, as shares of a step, for the first, second and third shade."""

_CODE = re.compile(
    r"`([^`]+)`"
    r"|(hvdtrain (?:doctor|timeline [a-z]+(?: RUN)?)"
    r"|(?:mpirun|nvidia-smi)(?: -[\w-]+(?: [A-Za-z](?:[\w,]*\w)?)?)+"
    r"|(?:[A-Z][A-Z0-9]*_[A-Z0-9_]+=\S*[^\s.,;:)])"
    r"|--[A-Za-z](?:[\w.-]*\w)?(?:[ =](?:(?=[^\s,;]*\d)[\w:./%+-]*[\w%]|(?:true|false|on|off|auto|none|all|speed)\b))?)"
)

_HUES = {
    "data": ("data", "input"),
    "copy": ("copy", goodput.START_UP),
    "forward": ("forward", goodput.USEFUL, "training (MFU)"),
    "backward": ("backward", "kernels below the peak"),
    "optimizer": ("optimizer",),
    "clip": ("clip",),
    "negotiation": ("negotiation",),
    "queue": ("queue", "exchange", goodput.RESTARTS),
    "copies": ("fusion copies",),
    "transfer": (
        *("transfer", "wait", "gather", "activations", "exposed communication"),
        *(budget.PARAMETERS, budget.ACTIVATIONS, goodput.STALLS),
    ),
    "late": (budget.LATE,),
    "other": ("other", "other exchange"),
    "gc": ("gc", "recomputation", budget.UNRECORDED, goodput.REPEATED),
    "aside": ("aside", "evaluation", "checkpoint", budget.ASIDE),
    "rest": ("rest", budget.IDLE, goodput.PAUSES),
}
"""Colours of the style sheet, and the names that have each."""
_HUE_OF = {name: hue for hue, names in _HUES.items() for name in names}
MEANINGS = {
    "data": "waiting for a batch, and copying it to the device",
    budget.LATE: "from when a rank is ready for the exchange until the last one is",
    "negotiation": "Horovod finds out that all ranks have a tensor",
    "queue": "tensors wait for the ones before them",
    "fusion copies": "into and out of the buffer in which Horovod joins small tensors",
    "transfer": "numbers move between ranks, and are summed",
    budget.EXCHANGE: "from when the last rank is ready until all have the sums",
    budget.OTHER_EXCHANGE: "of the exchange, in no phase of Horovod's Timeline: threads wake, buckets are coded",
    budget.PARAMETERS: "waiting for parameters that other ranks have updated",
    budget.ACTIVATIONS: "waiting for activations, and their gradients, of other ranks",
    "optimizer": "the norm, the scaling and the update",
    budget.UNRECORDED: "what stalled steps, and those without stamps, took more than the others",
    budget.ASIDE: "between two steps",
    budget.REST: "in no other part",
    budget.IDLE: "nothing is under way in the Timeline",
    "bus bandwidth": "bytes a second on each link: an allreduce of n bytes on p ranks moves 2 n (p - 1) / p",
}
"""Of the terms on the page."""
_MORE = ("a", "b", "c", "d")
"""Colours of unknown names."""


def finding_pieces(advice: str) -> list[tuple[str, bool]]:
    """Split the text into pieces, each with whether it is an option or a command to copy."""
    pieces, at = [], 0
    for found in _CODE.finditer(advice):
        if found.start() > at:
            pieces.append((advice[at : found.start()], False))
        pieces.append((found.group(1) or found.group(2), True))
        at = found.end()
    return [*pieces, (advice[at:], False)] if at < len(advice) else pieces


def blame_view(blame: Blame, step_ms: float | None) -> dict[str, Any]:
    """Return rows of ranks with whiskers [percent of the widest], the usual time of each part, and what is left out."""
    late = set(blame.late)
    shown = [row for at, row in enumerate(blame.ranks) if at < MOST_RANKS or row.rank in late]
    left = [row.cost_ms.value for at, row in enumerate(blame.ranks) if at >= MOST_RANKS and row.rank not in late]
    found = dict.fromkeys(name for row in shown for name in row.parts_ms)
    names = [name for name in found if any(row.parts_ms.get(name, 0.0) >= SEEN_MS for row in shown)]
    medians = {n: median([row.parts_ms[n] for row in blame.ranks if n in row.parts_ms]) for n in names}
    costs = [cost for row in shown for cost in (row.cost_ms.high, row.cost_ms.value)]
    most = max([cost for cost in costs if math.isfinite(cost)] + [1e-9])

    def place(value: float) -> float:
        return min(100.0, max(0.0, 100 * value / most)) if math.isfinite(value) else 0.0

    ends = ("value", "low", "high")
    return {
        "medians": medians,
        "rows": [{**vars(row), **{end: place(getattr(row.cost_ms, end)) for end in ends}} for row in shown],
        "whole": step_ms or sum(medians.values()) or 1.0,
        "left": len(left),
        "left_ms": max(left, default=0.0),
        "clock_error_ms": max((row.clock_error_ms for row in blame.ranks), default=0.0),
    }


def heat(share: float) -> str:
    """Return the class of a difference from the median, ``more-2`` or ``less-1``; empty near it."""
    level = sum(abs(share) >= bound for bound in _HEAT)
    return f"{'more' if share > 0 else 'less'}-{level}" if level else ""


def shares_view(amounts: Collection[tuple[str, float]], exposed: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return segments of a bar [x and width in percent], by name, which divide it as `amounts` do."""
    whole = sum(amount for _, amount in amounts) or 1.0
    begins = accumulate((100 * amount / whole for _, amount in amounts), initial=0.0)
    found = []
    for (name, amount), begin in zip(amounts, begins, strict=False):
        is_exposed, share = name in exposed, wording.percent(amount / whole)
        look = {"name": name, "hue": hue(name, exposed=is_exposed), "exposed": is_exposed, "share": share}
        found.append({**look, "x": begin, "width": 100 * amount / whole})
    return found


def hue(name: str, *, exposed: bool = False) -> str:
    """Return the name of a colour of the style sheet. An unknown name always gets the same one."""
    return _HUE_OF.get(name) or ("other" if exposed else _MORE[zlib.crc32(name.encode(errors="replace")) % len(_MORE)])


WIDTH, HEIGHT = 1000.0, 160.0
_ROOM = 1.15
_TICKS = 4
_SEEN = 0.002
"""Of a step: a part that never takes more is left out."""


def over_time_view(found: OverTime) -> dict[str, Any]:
    """Return areas of parts from bottom to top, the line of medians, bands, edges of moments, and marks.

    The top of the axis leaves few exceptional moments out.
    """
    moments = found.moments
    first, last = moments[0].first_step, moments[-1].last_step
    step_ms = [moment.step_ms for moment in moments]
    most = _ROOM * max(quantiles(step_ms, n=50)[-1] if len(moments) > 1 else step_ms[0], 1e-6)
    names = [n for n in moments[0].parts_ms if any(m.parts_ms[n] > _SEEN * m.step_ms for m in moments)]

    def x(step: int) -> float:
        return WIDTH * (step - first) / (last - first + 1)

    def y(value: float) -> str:
        return f"{HEIGHT * (1 - min(1.0, value / most)):.1f}"

    def line(values: Sequence[float]) -> str:
        """Return a path that is level between two edges."""
        steps = [f"V{y(value)}H{end:.1f}" for value, end in zip(values, edges[1:], strict=True)]
        return f"M{edges[0]:.1f} {y(values[0])}{''.join(steps)}"

    edges = [*(x(moment.first_step) for moment in moments), WIDTH]
    marks = [{**vars(mark), "x": x(mark.step)} for mark in found.marks if first <= mark.step <= last]
    starts = [mark["x"] for mark in marks if mark["kind"] == "start"]
    below, areas = [0.0] * len(moments), []
    for name in names:
        above = [low + moment.parts_ms[name] for low, moment in zip(below, moments, strict=True)]
        back = [f"V{y(value)}H{begin:.1f}" for value, begin in zip(below[::-1], edges[-2::-1], strict=True)]
        areas.append({"name": name, "hue": hue(name), "path": f"{line(above)}{''.join(back)}Z"})
        below = above
    return {
        "areas": areas,
        "median": line([moment.median_ms for moment in moments]),
        "bands": [{"x": x, "width": end - x} for x, end in list(pairwise([*starts, WIDTH]))[1::2]],
        "edges": edges,
        "marks": marks,
        "ticks": [moments[number * len(moments) // _TICKS] for number in range(_TICKS)],
        "top_ms": most,
    }
