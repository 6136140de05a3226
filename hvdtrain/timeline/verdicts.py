"""What is slow in a run now, as short sentences that change while it runs. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hvdtrain.timeline import wording
from hvdtrain.timeline.analysis.analysis import Analysis, Blame

_SHARE = 0.1
"""Of a step: smaller costs are no verdict."""
_APART = ("straggler", "change", "start_up", "pause", "compilations")
"""Kinds of findings that have sentences of their own, or are not about the present."""


def verdicts(analysis: Analysis) -> dict[str, str]:
    """Return sentences by what they are about; the same key stays while a verdict holds."""
    found = dict(_slow_ranks(analysis.blame))
    for change in analysis.changes:
        if change.lasts and not change.begins:
            found["step time"] = f"steps take longer since step {change.first_step:,}, {wording.slower(change)}"
    step_ms = analysis.budget.step_ms.value if analysis.budget is not None else 0.0
    for finding in analysis.findings:
        if finding.kind not in _APART and finding.cost_ms is not None and finding.cost_ms >= _SHARE * step_ms > 0:
            found[finding.kind] = f"{finding.text}; {finding.advice}"
    return found


def _slow_ranks(blame: Blame) -> Iterator[tuple[str, str]]:
    rows = {row.rank: row for row in blame.ranks}
    hosts = {rank: host for host, ranks in blame.slow_hosts().items() for rank in ranks}
    ended = {rank for rank in blame.late if (spells := blame.spells_of(rank)) and not spells[-1].lasts}
    for group in blame.late_groups([rank for rank in blame.late if rank not in ended]):
        rank, spells = group[0], blame.spells_of(group[0])
        host = rows[rank].host
        cost = wording.total(own[-1].cost_ms if (own := blame.spells_of(r)) else rows[r].cost_ms for r in group)
        when = wording.spells(spells[-1:])
        causes = blame.causes.get(rank, ())
        why = f": {causes[0].text}" if causes else ""
        if rank in hosts:
            yield f"host {host}", f"host {host} is slow{when}{why}"
        else:
            text = f"{wording.straggler(blame, rank)} is slow{when} and costs {wording.ms(cost.value)} ms per step{why}"
            yield f"rank {blame.group_of(rank)[0]}", text


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the sentences that are new, and those that hold no longer."""
    new = [text for key, text in now.items() if key not in before]
    return new + [f"no longer: {text}" for key, text in before.items() if key not in now]
