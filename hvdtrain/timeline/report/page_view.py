"""An analysis as the page's templates need it: numbers as text, widths as shares, colours by name, paths of SVG. Pure.

Colours are cool for work, warm for waiting, amber for input, grey for the rest.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, pairwise
from statistics import median, quantiles
from typing import Any

from hvdtrain.observe.cost import Cost, money, number
from hvdtrain.timeline import wording
from hvdtrain.timeline.analysis import goodput
from hvdtrain.timeline.analysis.analysis import Blame, Budget, Communication, Moment, OverTime, RankRow
from hvdtrain.timeline.analysis.goodput import Goodput

MOST_RANKS = 100
"""Rows of ranks: the most costly, and all stragglers."""

_SEEN_MS = 0.0005
_HEAT = (0.005, 0.02, 0.05)
"""Differences from the median, as shares of a step, for the first, second and third shade."""

_CODE = re.compile(
    r"`([^`]+)`"
    r"|(hvdtrain (?:doctor|timeline [a-z]+(?: RUN)?)"
    r"|(?:mpirun|nvidia-smi)(?: -[\w-]+(?: [A-Za-z](?:[\w,]*\w)?)?)+"
    r"|(?:[A-Z][A-Z0-9]*_[A-Z0-9_]+=\S*[^\s.,;:)])"
    r"|--[A-Za-z](?:[\w.-]*\w)?(?:[ =](?:(?=[^\s,;]*\d)[\w:./%+-]*[\w%]|(?:true|false|on|off|auto|none|all|speed)\b))?)"
)

_OWN = ("data", "copy", "forward", "backward", "optimizer", "clip", "negotiation", "queue", "transfer", "other", "gc")
_HUES = {name: name for name in (*_OWN, "step", "aside", "rest")} | {
    "wait": "transfer",
    "gather": "transfer",
    "parameter gather": "transfer",
    "activations": "transfer",
    "exchange of activations": "transfer",
    "waiting for late ranks": "late",
    "fusion copies": "copies",
    "evaluation": "aside",
    "checkpoint": "aside",
    "evaluations and checkpoints": "aside",
    "longer steps without stamps": "queue",
    "nothing under way": "rest",
    "exchange": "queue",
    "other exchange": "other",
    goodput.USEFUL: "forward",
    "training (MFU)": "forward",
    "kernels below the peak": "backward",
    "recomputation": "gc",
    "exposed communication": "transfer",
    "input": "data",
    goodput.STALLS: "transfer",
    goodput.START_UP: "copy",
    goodput.RESTARTS: "queue",
    goodput.REPEATED: "gc",
    goodput.PAUSES: "rest",
}
MORE = ("a", "b", "c", "d")
"""Colours of unknown names."""


def budget_view(budget: Budget) -> dict[str, Any]:
    """Return segments of the bar [x and width in percent], the bracket over exposed communication, and table rows."""
    total = sum(part.ms.value for part in budget.parts)
    places = wording.decimals(budget.step_ms.value)
    segments = shares_view([(part.name, part.ms.value / (total or 1.0)) for part in budget.parts])
    rows = [
        {
            **segment,
            "hue": hue(part.name, exposed=part.name in budget.exposed),
            "exposed": part.name in budget.exposed,
            "ms": wording.ms(part.ms.value, places),
            "interval": wording.interval(part.ms, places),
            "share": wording.percent(part.share),
        }
        for part, segment in zip(budget.parts, segments, strict=True)
    ]
    return {
        "rows": rows,
        "sum": wording.ms(total, places),
        "step": wording.ms(budget.step_ms.value, places),
        "step_interval": wording.interval(budget.step_ms, places),
        "bracket": _bracket(rows),
        "intervals": any(row["interval"] for row in rows),
    }


def _bracket(rows: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """Return where exposed communication is in the bar; None if there is none or it is not contiguous."""
    marked = [at for at, row in enumerate(rows) if row["exposed"]]
    if not marked or marked[-1] - marked[0] + 1 != len(marked):
        return None
    first, last = rows[marked[0]], rows[marked[-1]]
    return {"x": first["x"], "end": last["x"] + last["width"]}


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
    """Return rows of ranks with whiskers [percent of the widest] and heat, their parts, and the omitted ranks."""
    late = set(blame.late)
    shown = [row for at, row in enumerate(blame.ranks) if at < MOST_RANKS or row.rank in late]
    left = [row for at, row in enumerate(blame.ranks) if at >= MOST_RANKS and row.rank not in late]
    found = dict.fromkeys(name for row in shown for name in row.parts_ms)
    names = [name for name in found if any(row.parts_ms.get(name, 0.0) >= _SEEN_MS for row in shown)]
    medians = {n: median([row.parts_ms[n] for row in blame.ranks if n in row.parts_ms]) for n in names}
    whole = step_ms or sum(medians.values()) or 1.0
    costs = [cost for row in shown for cost in (row.cost_ms.high, row.cost_ms.value)]
    most = max([cost for cost in costs if math.isfinite(cost)] + [1e-9])
    return {
        "names": names,
        "rows": [_rank(row, medians, whole, most, blame) for row in shown],
        "left": len(left),
        "left_ms": wording.ms(max([row.cost_ms.value for row in left], default=0.0)),
        "compared": all(math.isfinite(row.clock_error_ms) for row in blame.ranks),
        "clocks": _clocks([row.clock_error_ms for row in blame.ranks]),
    }


def _rank(row: RankRow, medians: Mapping[str, float], whole: float, most: float, blame: Blame) -> dict[str, Any]:
    def at(value: float) -> float:
        return min(100.0, max(0.0, 100 * value / most)) if math.isfinite(value) else 0.0

    cells = []
    for name, usual in medians.items():
        value = row.parts_ms.get(name)
        more = 0.0 if value is None else value - usual
        cells.append({"value": value, "text": "" if value is None else wording.ms(value), "heat": _heat(more / whole)})
        cells[-1]["more"] = f"{more:+.2f} ms from the median" if cells[-1]["heat"] else ""
        cells[-1]["sign"] = "\u25b4" if more > 0 else "\u25be"
    return {
        **vars(row),
        "late": row.rank in blame.late,
        "costs": row.cost_ms.value >= _SEEN_MS,
        "bar": at(row.cost_ms.value),
        "low": at(row.cost_ms.low),
        "high": at(row.cost_ms.high),
        "cells": cells,
        "clock": _clock(row.clock_error_ms),
        "causes": blame.causes.get(row.rank, ()),
        "spells": wording.spells(blame.spells_of(row.rank)).strip(),
    }


def _clocks(errors_ms: Sequence[float]) -> str:
    """Say how well the ranks' clocks agree."""
    worst = max(errors_ms, default=0.0)
    if not math.isfinite(worst):
        return "the clocks of some ranks were never compared with rank 0's"
    return (
        f"the ranks' clocks agree to within {wording.ms(worst)} ms" if worst >= _SEEN_MS else "the ranks share a clock"
    )


def _clock(error_ms: float) -> str:
    """Say how precise a rank's clock is; empty for rank 0."""
    if not math.isfinite(error_ms):
        return "its clock was never compared with rank 0's"
    return f"its clock agrees with rank 0's to within {wording.ms(error_ms)} ms" if error_ms >= _SEEN_MS else ""


def _heat(share: float) -> str:
    """Return ``more-2`` or ``less-1``; empty near the median."""
    level = sum(abs(share) >= bound for bound in _HEAT)
    return f"{'more' if share > 0 else 'less'}-{level}" if level else ""


def communication_facts(found: Communication | None, *, steps: bool = True) -> list[tuple[str, str, str]]:
    """Return the known figures, each with its name and a comparison; per step if `steps`, else of the whole trace."""
    facts: list[tuple[str, str, str]] = []
    if found is None:
        return facts
    if found.busy_ms is not None:
        name = "of communication per step" if steps else "of communication in total"
        facts.append((f"{wording.ms(found.busy_ms)} ms", name, ""))
    if found.hidden_share is not None:
        facts.append((wording.percent(found.hidden_share), "hidden behind computation", ""))
    if found.bytes_per_step is not None:
        name = "per rank and step" if steps else "per rank in total"
        facts.append((wording.nbytes(found.bytes_per_step), name, ""))
    if found.bus_gb_per_s is not None:
        of_link = ""
        if found.link_gb_per_s:
            share = wording.percent(found.bus_gb_per_s / found.link_gb_per_s)
            of_link = f"{share} of the {wording.speed(found.link_gb_per_s)} of a large allreduce alone"
        facts.append((wording.speed(found.bus_gb_per_s), "bus bandwidth during transfers", of_link))
    return facts


def shares_view(shares: Collection[tuple[str, float]]) -> list[dict[str, Any]]:
    """Return segments of a bar [x and width in percent], by name; the shares sum to 1."""
    begins = accumulate((share for _, share in shares), initial=0.0)
    return [
        {"name": name, "hue": hue(name), "share": wording.percent(share), "x": 100 * begin, "width": 100 * share}
        for (name, share), begin in zip(shares, begins, strict=False)
    ]


def goodput_rows(found: Goodput, cost: Cost | None) -> list[dict[str, Any]]:
    """Return segments of the bar, with device-hours and money as text."""
    total = sum(found.hours.values())
    paid = cost.money / total if cost is not None and cost.money is not None else None
    segments = shares_view([(use, hours / total) for use, hours in found.hours.items()])
    return [
        {**row, "hours": number(hours), "money": money(paid * hours) if paid is not None else ""}
        for row, hours in zip(segments, found.hours.values(), strict=True)
    ]


def cost_facts(cost: Cost) -> list[tuple[str, str]]:
    """Return the known figures of a cost, each with its name."""
    facts = [(number(cost.device_hours), "device-hours")]
    facts += [(number(kwh), f"kWh of {kind}") for kind, kwh in cost.energy_kwh.items()]
    if cost.money is not None:
        facts.append((money(cost.money), "money, at the price of --observe.price_per_hour"))
    return facts


def hue(name: str, *, exposed: bool = False) -> str:
    """Return the name of a colour of the style sheet. An unknown name always gets the same one."""
    return _HUES.get(name) or ("other" if exposed else MORE[zlib.crc32(name.encode(errors="replace")) % len(MORE)])


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
