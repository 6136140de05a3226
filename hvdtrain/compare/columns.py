"""Group runs that differ only in their seed. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.compare.read import RunRecord

_NOT_OF_TRAINING = ("seed", "run_dir", "resume", "log_level", "checkpoint.every", "checkpoint.keep")
"""Options in which runs of a group may differ, and those of output (`observe`)."""


@dataclass(frozen=True)
class Column:
    """One run, or several that differ only in their seed. Its figures are means over the runs."""

    runs: Sequence[RunRecord]

    @property
    def first(self) -> RunRecord:
        """The run that stands for the options of all."""
        return self.runs[0]


def group_by_seed(runs: Sequence[RunRecord]) -> list[Column]:
    """Group runs, in the order of the first run of each group.

    Runs with the same seed are not independent, so their group is not made; nor is one of all runs, which would leave
    nothing to compare.
    """
    groups: dict[str, list[RunRecord]] = {}
    for run in runs:
        groups.setdefault(repr(_identity(run)), []).append(run)
    if len(groups) == 1:
        return [Column([run]) for run in runs]
    columns = []
    for group in groups.values():
        seeds = {run.options.get("seed") for run in group}
        columns += [Column(group)] if len(seeds) == len(group) else [Column([run]) for run in group]
    place = {id(run): number for number, run in reversed([*enumerate(runs)])}
    return sorted(columns, key=lambda column: place[id(column.first)])


def differ_in_seed_only(a: RunRecord, b: RunRecord) -> bool:
    """Return whether two runs differ in their seed, and in nothing else that changes training."""
    return _identity(a) == _identity(b) and a.options.get("seed") != b.options.get("seed")


def differing(columns: Sequence[Column], facts: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the facts that differ between columns, by name, each with one value a column; None if it is unknown."""
    assert len(columns) == len(facts)
    names = sorted({name for each in facts for name in each})
    found = {name: [each.get(name) for each in facts] for name in names}
    return {name: values for name, values in found.items() if any(value != values[0] for value in values)}


def _identity(run: RunRecord) -> list[Any]:
    """Return what changes the losses of a run, or its speed, except its seed."""
    left_out = {name for name in run.options if name in _NOT_OF_TRAINING or name.startswith("observe.")}
    options = sorted((name, value) for name, value in run.options.items() if name not in left_out)
    started = run.started
    return [options, *(started.get(name) for name in ("size", "versions", "machine"))]
