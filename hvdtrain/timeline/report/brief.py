"""The summary of an analysis at the end of a run, in a few lines. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from hvdtrain.timeline import wording
from hvdtrain.timeline.analysis.analysis import Analysis, Blame, Budget, Finding

MOST_LINES = 18
_MOST_PARTS = 8
_BAR = 40
"""Characters of a bar for the whole step."""
_WIDTH = 79


def to_lines(analysis: Analysis) -> list[str]:
    """Return step time by part, the straggler, and the most costly finding; `MOST_LINES` at most."""
    lines = list(_budget(analysis.budget)) if analysis.budget is not None else []
    lines += _late(analysis.blame)
    lines += _finding(analysis.findings[0]) if analysis.findings else ["finding: none"]
    return lines


def _budget(budget: Budget) -> Iterator[str]:
    """List the largest parts in their order, and the sum of the others."""
    places = wording.decimals(budget.step_ms.value)
    ordered = sorted(budget.parts, key=lambda part: -part.ms.value)
    kept = ordered if len(ordered) <= _MOST_PARTS else ordered[: _MOST_PARTS - 1]
    rows = [
        (f"exposed: {part.name}" if part.name in budget.exposed else part.name, part.ms.value, part.share)
        for part in budget.parts
        if part in kept
    ]
    if len(rows) < len(ordered):
        left = ordered[len(rows) :]
        rows.append(("other parts", sum(part.ms.value for part in left), sum(part.share for part in left)))
    steps = wording.counted(budget.steps, "step")
    yield f"step time: {wording.ms(budget.step_ms.value, places)} ms ({budget.what}, {steps})"
    width = max(len(name) for name, _, _ in rows) if rows else 0
    longest = max(len(wording.ms(ms, places)) for _, ms, _ in rows) if rows else 0
    for name, ms, share in rows:
        bar = "#" * round(_BAR * share)
        yield f"  {name:<{width}}  {wording.ms(ms, places):>{longest}} ms {share:6.1%}  {bar}".rstrip()


def _late(blame: Blame) -> list[str]:
    if not blame.late:
        return _wrapped(f"straggler: {'none' if blame.source != 'none' else 'unknown'}", blame.reason)
    rank = blame.late[0]
    row = next(row for row in blame.ranks if row.rank == rank)
    cost = f"{wording.ms(row.cost_ms.value)} ms per step {wording.interval(row.cost_ms)}".rstrip()
    others = f", and {len(blame.late) - 1} more" if len(blame.late) > 1 else ""
    cause = next((cause.text for cause in blame.causes.get(rank, ())), "")
    where = f" on {row.host}" if row.host else ""
    return _wrapped(f"straggler: rank {rank}{where} costs {cost}{others}", cause)


def _finding(finding: Finding) -> list[str]:
    return [*_wrapped("finding", finding.text), *(_wrapped("  try", finding.advice) if finding.advice else ())]


def _wrapped(head: str, text: str) -> list[str]:
    """Wrap to three lines at most."""
    whole = " ".join(f"{head}: {text}".split()) if text else head
    indent = " " * (len(head) - len(head.lstrip()))
    lines = textwrap.wrap(whole, _WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ", max_lines=3)
    return lines or [head]
