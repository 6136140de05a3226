"""An analysis as text for a terminal: the report, the summary at the end of a run, verdicts while it runs. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping

from hvdtrain.errors import listed
from hvdtrain.observe import cost
from hvdtrain.timeline import wording
from hvdtrain.timeline.analysis.analysis import Analysis, Blame, Budget, Communication, OuterSteps

_BAR = 30
_LEAST_SHARE = 0.0005
_MOST_LINES, _WIDTH = 40, 110
_MOST_PARTS, _MOST_RANKS, _MOST_CARRIERS, _MOST_FINDINGS, _MOST_NOTES = 11, 4, 3, 4, 3

MOST_SUMMARY_LINES = 18
_SUMMARY_PARTS, _SUMMARY_BAR, _SUMMARY_WIDTH = 8, 40, 79


def to_text(analysis: Analysis) -> str:
    """Return step time by part, stragglers and findings: at most 40 lines of 120 characters."""
    for findings in range(_MOST_FINDINGS, 0, -1):
        lines = list(_lines(analysis, findings))
        if len(lines) <= _MOST_LINES:
            break
    return "\n".join(lines[:_MOST_LINES])


def _lines(analysis: Analysis, findings: int) -> Iterator[str]:
    yield _head(analysis)
    each = "in total" if analysis.budget is not None and not analysis.budget.steps else "per step"
    if analysis.budget is not None:
        yield from _budget(analysis.budget)
    if analysis.communication is not None:
        yield from _communication(analysis.communication, each)
    if analysis.outer is not None:
        yield f"{_workers(analysis.outer)}: {wording.outer(analysis.outer)}"
    yield from _blame(analysis.blame)
    if analysis.carriers:
        yield f"most expensive to exchange, ms {each}:"
    for carrier in analysis.carriers[:_MOST_CARRIERS]:
        exposed = f"  exposed {wording.ms(carrier.exposed_ms)}" if carrier.exposed_ms is not None else ""
        modules = shorten(", ".join(carrier.modules), 40)
        yield f"  {shorten(carrier.name, 36):<36} {wording.ms(carrier.ms):>7}{exposed}  {modules}".rstrip()
    of_run = [
        f"memory of rank 0: {wording.memory(analysis.memory)}" if analysis.memory else "",
        f"cost: {cost.text(analysis.cost)}" if analysis.cost else "",
        f"peak of the devices: {wording.efficiency(analysis.efficiency)}" if analysis.efficiency else "",
        wording.scaling(analysis.scaling) if analysis.scaling else "",
        f"goodput: {wording.goodput(analysis.goodput)}" if analysis.goodput else "",
    ]
    yield from (shorten(text, _WIDTH) for text in of_run if text)
    yield from _findings(analysis, findings)
    rest = [*(f"warning: {line}" for line in analysis.warnings), *analysis.notes]
    if rest:
        yield "notes:"
    yield from (f"  {shorten(note, _WIDTH - 2)}" for note in rest[:_MOST_NOTES])
    if len(rest) > _MOST_NOTES:
        yield f"  {len(rest) - _MOST_NOTES} more: --json"


def _head(analysis: Analysis) -> str:
    ranks = f", {wording.counted(analysis.size, 'rank')}" if analysis.size else ""
    title = shorten(analysis.title, 40)
    if (budget := analysis.budget) is None:
        return f"{title}{ranks}: no step was measured"
    steps = wording.counted(budget.steps, "step") if budget.steps else "no recognisable steps"
    return f"{title}{ranks}: {steps}, {shorten(budget.what, 56)}"


def _budget(budget: Budget) -> Iterator[str]:
    places = wording.decimals(budget.step_ms.value)
    yield f"{'step time:' if budget.steps else 'the trace spans'} {wording.quantity(budget.step_ms, places)} ms"
    shown = [part for part in budget.parts if part.share >= _LEAST_SHARE][:_MOST_PARTS]
    width = max((len(shorten(part.name, 30)) for part in shown), default=0) + 2
    for part in shown:
        name = shorten(part.name, 30) + (" *" if part in budget.exposed_parts else "")
        bar = "#" * round(_BAR * part.share)
        yield f"  {name:<{width}} {wording.quantity(part.ms, places):<28} {part.share:6.1%}  {bar}".rstrip()
    if budget.exposed:
        share = sum(part.share for part in budget.exposed_parts)
        yield f"  * exposed communication: {share:.1%} of {'the step' if budget.steps else 'the trace'}"


def _communication(found: Communication, each: str) -> Iterator[str]:
    words = [
        f"{wording.ms(found.busy_ms)} ms {each}" if found.busy_ms is not None else "",
        f"{found.hidden_share:.0%} hidden" if found.hidden_share is not None else "",
        wording.nbytes(found.bytes_per_step) if found.bytes_per_step is not None else "",
        f"bus bandwidth {wording.speed(found.bus_gb_per_s)}" if found.bus_gb_per_s is not None else "",
        f"link {wording.speed(found.link_gb_per_s)}" if found.link_gb_per_s is not None else "",
    ]
    if any(words):
        yield f"communication: {', '.join(filter(None, words))}"
    if found.phases:
        yield f"  {', '.join(f'{part.name} {wording.ms(part.ms.value)} ms' for part in found.phases)}"


def _blame(blame: Blame) -> Iterator[str]:
    if blame.source == "none":
        yield f"stragglers: unknown{'; ' + blame.reason if blame.reason else ''}"
        return
    source = "step stamps" if blame.source == "stamps" else "Horovod's ticks"
    found = blame.late_groups()
    none = f"{'unknown' if blame.unknown else 'none'} ({blame.reason})"
    late = listed((wording.straggler(blame, group[0], on=False) for group in found), 8) or none
    yield shorten(f"stragglers ({source} of {wording.counted(blame.steps, 'step')}): {late}", 120)
    for row in blame.ranks[:_MOST_RANKS] if blame.late else ():
        name = shorten(f"rank {row.rank}{' on ' + row.host if row.host else ''}", 24)
        behind, last = wording.behind(row.behind_ms), f"last in {row.last_share:4.0%} of steps"
        yield f"  {name:<24} {behind} the others, {last}, costs {wording.quantity(row.cost_ms)} ms"
        if spells := blame.spells_of(row.rank):
            worst = max((spell.cost_ms for spell in spells), key=lambda each: each.value)
            yield f"    straggler{wording.spells(spells)}: there it costs {wording.quantity(worst)} ms"
        if row.rank in blame.late:
            causes = list(blame.causes.get(row.rank, ()))[: 2 if len(blame.late) == 1 else 1]
            yield from (f"    {shorten(cause.text, _WIDTH - 4)}" for cause in causes)


def _findings(analysis: Analysis, most: int) -> Iterator[str]:
    if not analysis.findings:
        yield "findings: none"
        return
    yield "findings, most costly first:"
    for finding in analysis.findings[:most]:
        yield from _wrapped(finding.text, "  - ")
        yield from _wrapped(finding.advice, "    > ")
    if len(analysis.findings) > most:
        yield f"  {len(analysis.findings) - most} more: --json"


def _wrapped(text: str, begin: str) -> list[str]:
    """Wrap to two lines at most, with a hanging indent."""
    return textwrap.wrap(_plain(text), _WIDTH, initial_indent=begin, subsequent_indent=" " * len(begin), max_lines=2)


def shorten(text: str, width: int) -> str:
    """Return one line without control characters, cut to `width`."""
    line = _plain(text)
    return line if len(line) <= width else f"{line[: width - 3]}..."


def _plain(text: str) -> str:
    """Return one line without control characters."""
    return "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))


def summary_lines(analysis: Analysis) -> list[str]:
    """Return step time by part, the straggler, and the most costly finding; `MOST_SUMMARY_LINES` at most."""
    apart = _wrapped_head(_workers(analysis.outer), wording.outer(analysis.outer)) if analysis.outer else []
    most = _SUMMARY_PARTS - len(apart)
    lines = list(_summary_budget(analysis.budget, most)) if analysis.budget is not None else []
    lines += [*apart, *_summary_late(analysis.blame)]
    if not analysis.findings:
        return [*lines, "finding: none"]
    finding = analysis.findings[0]
    lines += _wrapped_head("finding", finding.text)
    return [*lines, *(_wrapped_head("  try", finding.advice) if finding.advice else ())]


def _workers(outer: OuterSteps) -> str:
    return f"{outer.workers} workers, {shorten(outer.sync, 24)}"


def _summary_budget(budget: Budget, most: int) -> Iterator[str]:
    """List the largest parts in their order, and the sum of the others: `most` lines."""
    places = wording.decimals(budget.step_ms.value)
    ordered = sorted(budget.parts, key=lambda part: -part.ms.value)
    kept = ordered if len(ordered) <= most else ordered[: most - 1]
    rows = [
        (f"exposed: {part.name}" if part in budget.exposed_parts else part.name, part.ms.value, part.share)
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
        bar = "#" * round(_SUMMARY_BAR * share)
        yield f"  {name:<{width}}  {wording.ms(ms, places):>{longest}} ms {share:6.1%}  {bar}".rstrip()


def _summary_late(blame: Blame) -> list[str]:
    if not blame.late:
        return _wrapped_head(f"straggler: {'unknown' if blame.unknown else 'none'}", blame.reason)
    name, cost, ranks = wording.worst_straggler(blame)
    more = len(blame.late) - len(ranks)
    cause = next((cause.text for cause in blame.causes.get(ranks[0], ())), "")
    return _wrapped_head(f"straggler: {name} costs {cost}{f', and {more} more' if more else ''}", cause)


def _wrapped_head(head: str, text: str) -> list[str]:
    """Wrap to three lines at most."""
    whole = " ".join(f"{head}: {text}".split()) if text else head
    indent = " " * (len(head) - len(head.lstrip()))
    lines = textwrap.wrap(whole, _SUMMARY_WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ", max_lines=3)
    return lines or [head]


_SHARE = 0.1
"""Of a step: smaller costs are no verdict."""
_APART = ("straggler", "change", "start_up", "pause", "compilations")
"""Kinds of findings that have sentences of their own, or are not about the present."""


def verdicts(analysis: Analysis) -> dict[str, str]:
    """Return what is slow now: sentences by what they are about; the same key stays while a verdict holds."""
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
