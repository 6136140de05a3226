"""An analysis as one self-contained HTML page."""

from __future__ import annotations

import base64
import hashlib
import math
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

import hvdtrain
from hvdtrain.observe.cost import money, number
from hvdtrain.timeline import wording
from hvdtrain.timeline.analysis.analysis import Analysis, figures
from hvdtrain.timeline.report import page_view

if TYPE_CHECKING:
    from jinja2 import Environment

VERSION = 1
"""Of the page's format."""

_MUCH_PAUSED = 0.02
"""Of a step: less is not in the headline."""

_FILTERS = (
    *(wording.decimals, wording.elapsed, wording.interval, wording.ms, wording.nbytes, wording.outer, wording.percent),
    *(wording.scaling, wording.speed, wording.spells, money, number, page_view.finding_pieces, page_view.heat),
    *(page_view.hue, page_view.shares_view),
)
"""Functions of the templates."""


def to_html(analysis: Analysis) -> str:
    """Return the page of an analysis.

    It loads nothing, and its Content-Security-Policy forbids loading. All texts are escaped.
    """
    style, script = _read("report.css"), _read("report.js")
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)]
    policy = "default-src 'none'; style-src 'sha256-{}'; script-src 'sha256-{}'; base-uri 'none'; form-action 'none'"
    own = {"version": VERSION, "program": hvdtrain.__version__, "style": style, "script": script}
    view = {**_view(analysis), **own, "policy": policy.format(*hashes)}
    return wording.readable(_environment().get_template("report.html").render(view))


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
        clauses.append("stragglers are unknown" if analysis.blame.unknown else "there is no straggler")
    clauses += [wording.earlier_straggler(other) for other in analysis.others[-1:]]
    least_ms = _MUCH_PAUSED * budget.step_ms.value if budget is not None else 0.0
    pauses = [each for each in analysis.findings if each.kind == "pause" and (each.cost_ms or 0.0) >= least_ms]
    clauses += [each.text.partition(";")[0] for each in pauses[:1]]
    return clauses or ["No step was measured"]


def _view(analysis: Analysis) -> dict[str, Any]:
    """Return the variables of the templates."""
    steps = analysis.budget is None or analysis.budget.steps > 0
    used = analysis.efficiency
    parts, exposed = (analysis.budget.parts, analysis.budget.exposed or ()) if analysis.budget else ((), ())
    return {
        "analysis": analysis,
        "headline": headline(analysis),
        "meanings": page_view.MEANINGS,
        "segments": page_view.shares_view([(part.name, part.ms.value) for part in parts], exposed),
        "blame": page_view.blame_view(analysis.blame, analysis.budget.step_ms.value if analysis.budget else None),
        "over_time": page_view.over_time_view(analysis.over_time) if analysis.over_time else None,
        "efficiency": {"training (MFU)": used.mfu, **used.lost} if used else {},
        "steps": steps,
        "each_ms": "ms per step" if steps else "ms",
        "figures": figures(analysis),
        "seen_ms": page_view.SEEN_MS,
    }


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
