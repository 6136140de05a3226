"""The starts and rounds of a run: each has ranks of its own, and counts by its steps. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hvdtrain.observe.cost import as_mapping
from hvdtrain.observe.past_journal import JournalStart
from hvdtrain.timeline import wording
from hvdtrain.timeline.analysis.analysis import Budget, Estimate
from hvdtrain.timeline.analysis.budget import budget_of
from hvdtrain.timeline.analysis.inputs import Facts
from hvdtrain.timeline.analysis.stragglers import weighed_mean
from hvdtrain.timeline.columns import RunTrace

ENOUGH = 10
"""Recorded steps of a start that is analysed."""


def rounds_of(run: RunTrace) -> list[RunTrace]:
    """Return the starts with enough stamps in order, each as a run; `run` itself for its own."""
    found = []
    for index, table in run.stamped:
        start = run.starts[index] if 0 <= index < len(run.starts) else JournalStart({})
        config = as_mapping(start.started.get("config")) or run.config
        more: dict[str, Any] = {"size": len(table.hosts), "horovod": (), "spans": (), "journal": None}
        if table is run.steps:
            found.append(run)
        elif len(table.step) >= ENOUGH:
            found.append(replace(run, steps=table, start=start, config=config, evidence=lambda: None, **more))
    return found if any(each is run for each in found) else [run]


def counted_steps(runs: Sequence[RunTrace]) -> list[int]:
    """Return how many steps of each of several starts count: no later start repeated them. At least one does."""
    found: list[int] = []
    end = None
    for table in [run.steps for run in reversed(runs)]:
        first, last = (int(table.step[0]), int(table.step[-1])) if table is not None and len(table.step) else (0, 0)
        found.append(max(0, (last if end is None else min(last, end)) - first + 1))
        end = first - 1
    return found[::-1]


def weighed_budget(starts: Sequence[Facts], counts: Sequence[int]) -> Budget | None:
    """Return the mean budget of starts by the number of steps that count."""
    known = [(each, each.budget, count) for each, count in zip(starts, counts, strict=True) if each.budget and count]
    if len(known) < 2:
        budget, table = (known[0][1], known[0][0].run.steps) if known else (None, None)
        if budget is not None and table is not None and known[0][0].run.is_part:
            budget = replace(budget, what=f"{budget.what}, only steps {table.step[0]} to {table.step[-1]}")
        return budget
    total, sizes = sum(count for *_, count in known), sorted({each.run.size for each in starts})
    shares = [count / total for *_, count in known]
    found = [{part.name: part.ms for part in budget.parts} for _, budget, _ in known]
    names = dict.fromkeys(name for _, each, _ in known for name in (*(part.name for part in each.parts), *each.absent))
    ms = {name: weighed_mean([each.get(name, Estimate(0.0, 0.0, 0.0)) for each in found], shares) for name in names}
    ranks = f"{sizes[0]} to {sizes[-1]} ranks" if len(sizes) > 1 else wording.counted(sizes[0], "rank")
    ends = [int(step) for each in starts if each.run.steps is not None for step in each.run.steps.step[[0, -1]]]
    what = f"mean of {ranks}, steps {min(ends)} to {max(ends)} of {len(known)} starts"
    exposed = [name for _, each, _ in known for name in each.exposed or ()]
    whole = weighed_mean([each.step_ms for _, each, _ in known], shares)
    return budget_of(what, whole, sum(each.steps for _, each, _ in known), ms, exposed)
