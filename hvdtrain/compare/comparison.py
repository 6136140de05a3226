"""The comparison of runs with the first of them; runs that differ only in their seed are one column. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdtrain.compare.read import HELD_OUT, LOSS, SAMPLES, SECONDS, Curve, RunRecord
from hvdtrain.errors import ConfigError
from hvdtrain.observe.cost import as_mapping
from hvdtrain.timeline.analysis.analysis import Estimate
from hvdtrain.timeline.analysis.stats import half_width, student
from hvdtrain.yaml_file import flatten

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


WINDOW, LEAST_STEPS = 0.1, 20
"""The training loss is averaged over this part of the common length, and over this many steps of the base at least."""

SEEDS, NOISE, STEPS, NOTHING = "seeds", "noise", "steps", "nothing"
"""Where the interval of a difference is from."""

_COSTS: Mapping[str, Callable[[RunRecord], float | None]] = {
    "seconds": lambda run: float(run.losses[SECONDS].ends[-1]),
    "device_hours": lambda run: run.cost.device_hours if run.cost else None,
    "energy_kwh": lambda run: run.cost.all_kwh if run.cost else None,
    "money": lambda run: run.cost.money if run.cost else None,
    "late_percent": lambda run: 100 * run.kept.share if run.kept else None,
}
"""Figures of the cost of a run."""


@dataclass(frozen=True)
class Row:
    """One figure of all columns at one place."""

    figure: str  # loss, heldout_loss, or a metric of the task; for the axis steps, a part of a step in milliseconds
    axis: str  # samples, seconds of training, or steps
    place: float  # on the axis: the last one that all columns with this figure have
    window: float  # length of the window before it that values are means of; 0 for evaluations
    values: Sequence[float | None]  # by column; None if a column lacks the figure
    differences: Sequence[Estimate | None]  # value minus the first column's, with its 95% interval; None in the first
    sources: Sequence[str]  # of the intervals: seeds, noise or nothing


@dataclass(frozen=True)
class Comparison:
    """Runs compared with the first."""

    columns: Sequence[Sequence[str]]  # by column, the folders of its runs: several, if they differ only in their seed
    states: Sequence[str]  # by column, how far its runs are
    rows: Sequence[Row]  # by samples, by seconds, then step times
    costs: Mapping[str, Sequence[float | None]]  # by name, one a column: means over its runs; None if unknown
    options: Mapping[str, Sequence[Any]]  # options that differ, by name, one value a column
    versions: Mapping[str, Sequence[Any]]  # of software, likewise
    machines: Mapping[str, Sequence[Any]]  # ranks, hosts and devices, likewise
    notes: Sequence[str]  # what limits the comparison


def compare(runs: Sequence[RunRecord]) -> Comparison:
    """Compare runs with the first, without step times. Errors: ConfigError: a run has no figure in common with it."""
    columns = group_by_seed(runs)
    rows = [row for axis in (SAMPLES, SECONDS) for row in _rows(columns, axis)]
    base = columns[0][0]
    for number, (other, *_) in enumerate(columns[1:], 1):
        if all(row.values[number] is None for row in rows):
            raise ConfigError(
                f"{other.path} and {base.path} cannot be compared: they have no loss or metric in common",
                expected="runs of one task, or with equal names of metrics",
                found=f"tasks {' in '.join(base.task)} and {' in '.join(other.task)}",
            )
    options = differing_options([column[0].options for column in columns])
    if any(len(column) > 1 for column in columns):
        options.pop("seed", None)
    return Comparison(
        columns=[[str(run.path) for run in column] for column in columns],
        states=["; ".join(dict.fromkeys(run.state for run in column)) for column in columns],
        rows=rows,
        costs={name: [_mean(_of_runs(column, of_run)) for column in columns] for name, of_run in _COSTS.items()},
        options=options,
        versions=differing([as_mapping(column[0].started.get("versions")) for column in columns]),
        machines=differing([_machine(column[0]) for column in columns]),
        notes=list(_notes(columns, rows)),
    )


def _rows(columns: Sequence[Column], axis: str) -> Iterator[Row]:
    base = columns[0][0]
    alike = [column for column in columns if column[0].task == base.task]
    curves = [run.losses[axis] for column in alike for run in column]
    first, end = max(curve.first for curve in curves), min(float(curve.ends[-1]) for curve in curves)
    if len(alike) > 1 and end > first:
        # The training losses before the first end, and where all runs have steps.
        low = max(first, end - max(WINDOW * end, LEAST_STEPS * base.losses[axis].usual_length))
        values = [_of_runs(c, lambda run: run.losses[axis].mean(low, end)) if c in alike else None for c in columns]
        yield _row(columns, values, LOSS, axis, low, end)
    for name in dict.fromkeys(name for column in columns for run in column for name in run.evaluations):
        having = [c for c in columns if all(name in run.evaluations for run in c) and (name != HELD_OUT or c in alike)]
        if columns[0] in having and len(having) > 1:
            yield _evaluation_row(columns, having, name, axis)


def _evaluation_row(columns: Sequence[Column], having: Sequence[Column], name: str, axis: str) -> Row:
    place = float(min(run.evaluations[name][axis].places[-1] for column in having for run in column))
    values = [
        _of_runs(column, lambda run: run.evaluations[name][axis].at(place)) if column in having else None
        for column in columns
    ]
    return _row(columns, values, name, axis, place, place)


def _row(
    columns: Sequence[Column], values: Sequence[list[float] | None], figure: str, axis: str, low: float, place: float
) -> Row:
    """Return the row of a figure from its values in each run; means from `low` to `place`, if that is a window."""
    differences: list[Estimate | None] = [None]
    sources = [NOTHING]
    for (run, *_), value in zip(columns[1:], values[1:], strict=True):
        found, source = None, NOTHING
        if (base := values[0]) and value:
            if len(base) > 1 or len(value) > 1:
                found, source = difference_by_seeds(base, value), SEEDS
            elif low < place:
                found, source = difference_by_noise(columns[0][0].losses[axis], run.losses[axis], low, place), NOISE
            else:
                found = unknown(value[0] - base[0])
        differences.append(found)
        sources.append(source)
    return Row(figure, axis, place, place - low, [_mean(each) for each in values], differences, sources)


def difference_by_noise(a: Curve, b: Curve, low: float, high: float) -> Estimate | None:
    """Return the mean of b - a from `low` to `high` with its 95% interval; None if they have nothing in common there.

    Both curves are compared place by place, so that a trend, and samples that both saw there, cancel out. The interval
    is by batch means (`half_width`): it knows the noise from step to step, not that from seed to seed.
    """
    edges = np.unique(np.concatenate([[low, high], a.begins, a.ends, b.begins, b.ends]))
    edges = edges[(edges >= low) & (edges <= high)]
    middles, weights = (edges[1:] + edges[:-1]) / 2, np.diff(edges)
    (values_a, in_a), (values_b, in_b) = a.at(middles), b.at(middles)
    inside = in_a & in_b & (weights > 0)
    differences, weights = (values_b - values_a)[inside], weights[inside]
    if not len(differences):
        return None
    mean = float(np.average(differences, weights=weights))
    if len(differences) == 1 or not math.isfinite(mean):
        return unknown(mean)
    half = half_width(differences - mean, weights)
    return Estimate(mean, mean - half, mean + half)


def difference_by_seeds(a: Sequence[float], b: Sequence[float]) -> Estimate:
    """Return the difference of means b - a with its 95% interval, from runs that differ in their seeds.

    Welch's interval (Biometrika 34, 1947) with Satterthwaite's degrees of freedom. If one side has a single run, it is
    Student's, which assumes that both sides vary equally.
    """
    mean = float(np.mean(b) - np.mean(a))
    spread = [float(np.var(each, ddof=1)) / len(each) if len(each) > 1 else math.nan for each in (a, b)]
    if len(a) > 1 and len(b) > 1:
        total = sum(spread)
        parts = [part**2 / (len(each) - 1) for part, each in zip(spread, (a, b), strict=True)]
        degrees = total**2 / sum(parts) if total > 0 else 1.0
    else:
        known = a if len(a) > 1 else b
        total = float(np.var(known, ddof=1)) * (1 / len(a) + 1 / len(b))
        degrees = len(known) - 1
    half = student(degrees) * math.sqrt(total)
    return Estimate(mean, mean - half, mean + half)


def unknown(value: float) -> Estimate:
    """Return an estimate without an interval."""
    return Estimate(value, -math.inf, math.inf)


def _of_runs(column: Column, of_run: Callable[[RunRecord], float | None]) -> list[float] | None:
    """Return a figure of each run; None if a run lacks it."""
    known = [value for value in map(of_run, column) if value is not None]
    return known if len(known) == len(column) else None


def _mean(values: Sequence[float] | None) -> float | None:
    return float(np.mean(values)) if values else None


def _machine(run: RunRecord) -> dict[str, Any]:
    return {"ranks": run.started.get("size"), **flatten(as_mapping(run.started.get("machine")))}


def _notes(columns: Sequence[Column], rows: Sequence[Row]) -> Iterator[str]:
    base = columns[0][0]
    used = {source for row in rows for source in row.sources[1:]}
    if SEEDS in used:
        counts = " and ".join(str(len(column)) for column in columns)
        single = any(len(column) == 1 for column in columns)
        how = "Welch's; Student's next to a single run, which assumes equal spread" if single else "Welch's"
        yield f"intervals are from the seeds ({counts} runs): {how}"
    if NOISE in used:
        yield (
            "intervals are from the noise of the training curve, one run each: another seed may change a difference by"
            " more. One seed each proves little: train several seeds of each"
        )
    if any(row.window == 0 and NOTHING in row.sources[1:] for row in rows):
        yield "single evaluations have no interval"
    others = [column[0] for column in columns[1:]]
    alike = all(_identity(run) == _identity(base) for run in others)
    if others and alike and all(run.options.get("seed") != base.options.get("seed") for run in others):
        yield "the runs differ only in their seed: their differences are what a seed changes"
    if any(column[0].task != base.task for column in columns[1:]):
        yield "the tasks differ: their losses are not compared, only metrics with equal names"
    costs = [run.cost for column in columns for run in column if run.cost is not None]
    kinds = {tuple(cost.energy_kwh) for cost in costs}
    if len(kinds) > 1:
        yield f"energy is not of the same parts: {'; '.join(sorted(' and '.join(kind) or 'none' for kind in kinds))}"
    reasons = dict.fromkeys(each for cost in costs for each in cost.unmeasured.items())
    yield from (f"energy of {kind} not measured: {why}" for kind, why in reasons)
