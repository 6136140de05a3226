"""The starts and rounds of a run: each has ranks of its own, and counts by its steps. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hvdtrain.observe.cost import as_mapping
from hvdtrain.observe.past_journal import JournalStart
from hvdtrain.timeline import wording
from hvdtrain.timeline.analysis.analysis import Budget, Estimate
from hvdtrain.timeline.analysis.budget import budget_of
from hvdtrain.timeline.analysis.stragglers import weighed_mean
from hvdtrain.timeline.columns import RunTrace, StepTable

_ENOUGH = 10


def has_enough(table: StepTable) -> bool:
    """Return whether a start has enough recorded steps to be analysed."""
    return len(table.step) >= _ENOUGH


def rounds_of(run: RunTrace) -> list[RunTrace]:
    """Return the starts with enough stamps in order, each as a run; `run` itself for its own."""
    found = []
    if run.steps is None:
        return []
    for index, table in run.stamped:
        start = run.starts[index] if 0 <= index < len(run.starts) else JournalStart({})
        config = as_mapping(start.started.get("config")) or run.config
        if table is run.steps:
            found.append(run)
        elif has_enough(table):
            more: dict[str, Any] = {"size": len(table.hosts), "horovod": (), "spans": (), "journal": None}
            found.append(replace(run, steps=table, start=start, config=config, evidence=lambda: None, **more))
    return found or [run]


def counted_steps(runs: Sequence[RunTrace]) -> list[float]:
    """Return how many steps of each of several starts count: no later start repeated them."""
    found, end = [], np.inf
    for table in [run.steps for run in reversed(runs) if run.steps is not None]:
        found.append(max(0.0, min(float(table.step[-1]), end) - float(table.step[0]) + 1))
        end = min(end, float(table.step[0]) - 1)
    return found[::-1]


def weighed_budget(budgets: Sequence[Budget], runs: Sequence[RunTrace], steps: Sequence[float]) -> Budget:
    """Return the mean budget of starts with `steps` steps."""
    shares = [each / max(1.0, sum(steps)) for each in steps]
    sizes = sorted({run.size for run in runs})
    ranks = f"{sizes[0]} to {sizes[-1]} ranks" if len(sizes) > 1 else wording.counted(sizes[0], "rank")
    known = [{part.name: part.ms for part in budget.parts} for budget in budgets]
    names = dict.fromkeys(name for budget in budgets for name in (*(p.name for p in budget.parts), *budget.absent))
    nothing = Estimate(0.0, 0.0, 0.0)
    ms = {name: weighed_mean([parts.get(name, nothing) for parts in known], shares) for name in names}
    exposed = [name for budget in budgets for name in budget.exposed or ()]
    tables = [run.steps.step for run in runs if run.steps is not None]
    what = f"mean of {ranks}, steps {min(map(min, tables))} to {max(map(max, tables))} of {len(runs)} starts"
    whole = weighed_mean([budget.step_ms for budget in budgets], shares)
    return budget_of(what, whole, sum(budget.steps for budget in budgets), ms, exposed)
