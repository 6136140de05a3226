"""An analysis as one self-contained HTML page."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any

import hvdtrain
from hvdtrain.observe.cost import money, number
from hvdtrain.timeline import wording
from hvdtrain.timeline.analysis.analysis import Analysis, Lane, figures
from hvdtrain.timeline.analysis.goodput import rows as waterfall
from hvdtrain.timeline.report import page_view

if TYPE_CHECKING:
    from jinja2 import Environment

VERSION = 1
"""Of the page's format."""

MOST_SLICES = 50_000
"""In the picture: about 0.6 MB of the page."""

_MOST_LANES = 256
_MOST_NAMES = 10
_MUCH_PAUSED = 0.02
"""Of a step: less is not in the headline."""
_US = 1e3  # in a millisecond
_FILTERS = (
    *(wording.decimals, wording.elapsed, wording.interval, wording.ms, wording.nbytes, wording.outer, wording.percent),
    *(wording.scaling, wording.speed, wording.spells, money, number, page_view.finding_pieces, page_view.heat),
    *(page_view.hue, page_view.shares_view),
)
"""Functions of the templates."""


def to_html(analysis: Analysis) -> str:
    """Return the page of an analysis."""
    return render("report.html", _view(analysis), ["report.js", "lanes.js"])


def render(template: str, view: Mapping[str, Any], scripts: Sequence[str]) -> str:
    """Return a page from a template, its variables, and the names of its scripts.

    It loads nothing, and its Content-Security-Policy forbids loading. All texts are escaped.
    """
    style, texts = _read("report.css"), [_read(name) for name in scripts]
    own = {"style": style, "scripts": texts, "policy": _policy(style, texts)}
    page = {"version": VERSION, "program": hvdtrain.__version__}
    return wording.readable(_environment().get_template(template).render({**page, **view, **own}))


def headline(analysis: Analysis) -> list[str]:
    """Return the clauses of the page's first sentence."""
    clauses = []
    if (budget := analysis.budget) is not None:
        subject = "The step time is" if budget.steps else "The Timeline has no recognisable steps; it spans"
        clauses.append(f"{subject} {wording.ms(budget.step_ms.value)} ms")
        if exposed := budget.exposed_parts:
            ms, share = sum(part.ms.value for part in exposed), sum(part.share for part in exposed)
            clauses.append(f"{wording.ms(ms)} ms ({wording.percent(share)}) is exposed communication")
    if analysis.blame.late:
        name, cost, ranks = wording.worst_straggler(analysis.blame)
        clauses.append(f"{name} is a straggler and costs {cost}")
        if others := len(analysis.blame.late) - len(ranks):
            clauses.append(f"{wording.counted(others, 'more rank')} {'is' if others == 1 else 'are'} late")
    elif analysis.blame.source != "none" and not analysis.others:
        known = all(math.isfinite(row.clock_error_ms) for row in analysis.blame.ranks)
        clauses.append("there is no straggler" if known else "clocks were not compared, so stragglers are unknown")
    clauses += [wording.earlier_straggler(other) for other in analysis.others[-1:]]
    least_ms = _MUCH_PAUSED * budget.step_ms.value if budget is not None else 0.0
    pauses = [each for each in analysis.findings if each.kind == "pause" and (each.cost_ms or 0.0) >= least_ms]
    clauses += [each.text.partition(";")[0] for each in pauses[:1]]
    return clauses or ["No step was measured"]


def _view(analysis: Analysis) -> dict[str, Any]:
    """Return the variables of the templates."""
    lanes = shown_lanes(analysis)
    names, rows = summary(lanes)
    shown = dict.fromkeys(one.name for lane in lanes for one in lane.slices)
    legend = [(page_view.hue(name), name) for name in shown]
    steps = analysis.budget is None or analysis.budget.steps > 0
    parts, exposed = (analysis.budget.parts, analysis.budget.exposed or ()) if analysis.budget else ((), ())
    return {
        "analysis": analysis,
        "headline": headline(analysis),
        "segments": page_view.shares_view([(part.name, part.ms.value) for part in parts], exposed),
        "blame": page_view.blame_view(analysis.blame, analysis.budget.step_ms.value if analysis.budget else None),
        "over_time": page_view.over_time_view(analysis.over_time) if analysis.over_time else None,
        "efficiency": waterfall(analysis.efficiency) if analysis.efficiency else {},
        "steps": steps,
        "each_ms": "ms per step" if steps else "ms",
        "figures": figures(analysis),
        "lanes": packed(lanes),
        "legend": [each for each in legend if each[0] not in page_view.MORE][:16],
        "lane_names": names,
        "lane_rows": rows[:100],
        "lanes_shown": len(lanes),
        "lanes_left": len(analysis.lanes) - len(lanes),
        "seen_ms": page_view.SEEN_MS,
    }


def _policy(style: str, scripts: list[str]) -> str:
    """Return the Content-Security-Policy: only these scripts and this style."""
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in [style, *scripts]]
    own = [f"'sha256-{found}'" for found in hashes]
    rest = "base-uri 'none'; form-action 'none'"
    return f"default-src 'none'; style-src {own[0]}; script-src {' '.join(own[1:])}; {rest}"


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("hvdtrain.timeline.report", "templates")
    found = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    found.filters["sentence"] = lambda text: text[:1].upper() + text[1:]
    found.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    found.tests["finite"] = math.isfinite
    found.filters |= {each.__name__: each for each in _FILTERS}
    return found


def _read(name: str) -> str:
    return resources.files("hvdtrain.timeline.report").joinpath("templates").joinpath(name).read_text(encoding="utf-8")


def shown_lanes(analysis: Analysis) -> list[Lane]:
    """Return the lanes to show, in order. If there are too many, those of stragglers have priority."""
    late = set(analysis.blame.late)

    def is_of_others(at: int) -> bool:
        found = re.match(r"rank (\d+)\b", analysis.lanes[at].label)
        return found is None or int(found.group(1)) not in late

    order = sorted(range(len(analysis.lanes)), key=is_of_others)[:_MOST_LANES]
    totals = accumulate(len(analysis.lanes[at].slices) for at in order)
    kept = [at for at, total in zip(order, totals, strict=True) if at == order[0] or total <= MOST_SLICES]
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
        before = 0
        ordered = sorted(lane.slices, key=lambda s: (s.start_ms, -s.end_ms))[:MOST_SLICES]
        for one in ordered:
            start, until = round(one.start_ms * _US), round(one.end_ms * _US)
            row += [numbers.setdefault(one.name, len(numbers)), start - before, until - start]
            before, end = start, max(end, until)
        steps = [(step, len(list(those))) for step, those in groupby(one.step for one in ordered)]
        found.append([lane.label, row, [number for pair in steps for number in pair]])
    return {"names": [[name, page_view.hue(name)] for name in numbers], "lanes": found, "end": end}


def summary(lanes: Sequence[Lane]) -> tuple[list[str], list[tuple[str, list[float | None]]]]:
    """Return the names with most time, and for each lane their milliseconds per step."""
    totals: defaultdict[str, float] = defaultdict(float)
    rows = []
    for lane in lanes:
        of_lane: defaultdict[str, float] = defaultdict(float)
        for one in lane.slices:
            for sums in (of_lane, totals):
                sums[one.name] += one.end_ms - one.start_ms
        rows.append((lane.label, of_lane, len({one.step for one in lane.slices}) or 1))
    names = sorted(totals, key=lambda name: (name != "step", -totals[name]))[:_MOST_NAMES]
    return names, [(label, [of[n] / steps if n in of else None for n in names]) for label, of, steps in rows]
