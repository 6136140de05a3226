"""Group runs that differ only in their seed. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain.compare.read import RunRecord

_NOT_OF_TRAINING = ("seed", "run_dir", "resume", "log_level", "checkpoint.every", "checkpoint.keep")
"""Options in which runs of a group may differ, and those of output (`observe`)."""


Column = Sequence[RunRecord]
"""One run, or several that differ only in their seed; the first stands for the options of all."""


def group_by_seed(runs: Sequence[RunRecord]) -> list[Column]:
    """Group runs, in the order of the first run of each group.

    Runs with the same seed are not independent, so their group is not made; nor is one of all runs, which would leave
    nothing to compare.
    """
    groups: dict[str, list[RunRecord]] = {}
    for run in runs:
        groups.setdefault(repr(_identity(run)), []).append(run)
    if len(groups) == 1:
        return [[run] for run in runs]
    columns: list[Column] = []
    for group in groups.values():
        seeds = {run.options.get("seed") for run in group}
        columns += [group] if len(seeds) == len(group) else [[run] for run in group]
    return sorted(columns, key=lambda column: runs.index(column[0]))


def differ_in_seed_only(a: RunRecord, b: RunRecord) -> bool:
    """Return whether two runs differ in their seed, and in nothing else that changes training."""
    return _identity(a) == _identity(b) and a.options.get("seed") != b.options.get("seed")


def differing(facts: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the facts that differ between columns, by name, each with one value a column; None if it is unknown."""
    found = {name: [each.get(name) for each in facts] for name in sorted({name for each in facts for name in each})}
    return {name: values for name, values in found.items() if any(value != values[0] for value in values)}


def differing_options(options: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the options that differ, by dotted name, without those that say where a run is."""
    return {name: values for name, values in differing(options).items() if name not in ("run_dir", "resume")}


def _identity(run: RunRecord) -> list[Any]:
    """Return what changes the losses of a run, or its speed, except its seed."""
    of_training = (name for name in run.options if name not in _NOT_OF_TRAINING and not name.startswith("observe."))
    options = [(name, run.options[name]) for name in sorted(of_training)]
    return [options, *(run.started.get(name) for name in ("size", "versions", "machine"))]
