"""The comparison of runs with the first of them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdtrain.compare.columns import Column, differ_in_seed_only, differing, group_by_seed
from hvdtrain.compare.curves import SAMPLES, SECONDS, difference_by_noise, difference_by_seeds, unknown
from hvdtrain.compare.read import HELD_OUT, LOSS, RunRecord
from hvdtrain.errors import ConfigError
from hvdtrain.observe.cost import as_mapping
from hvdtrain.timeline.analysis.analysis import Estimate
from hvdtrain.yaml_file import flatten

WINDOW, LEAST_STEPS = 0.1, 20
"""The training loss is averaged over this part of the common length, and over this many steps of the base at least."""

SEEDS, NOISE, NOTHING = "seeds", "noise", "nothing"
"""Where the interval of a difference is from."""

_PLACES = ("run_dir", "resume")


@dataclass(frozen=True)
class Row:
    """One figure of all columns at one place.

    Attributes:
        figure: loss, heldout_loss, or a metric of the task.
        axis: samples, or seconds of training.
        place: on the axis: the last one that all columns with this figure have.
        window: length of the window before it that values are means of; 0 for evaluations.
        values: by column; None if a column lacks the figure.
        differences: value minus that of the first column, with its 95% interval if that is known; None in the first.
        sources: of the intervals: seeds, noise or nothing.
    """

    figure: str
    axis: str
    place: float
    window: float
    values: Sequence[float | None]
    differences: Sequence[Estimate | None]
    sources: Sequence[str]


@dataclass(frozen=True)
class Comparison:
    """Runs compared with the first.

    Attributes:
        columns: by column, the folders of its runs: several, if they differ only in their seed.
        states: by column, how far its runs are.
        rows: by samples, then by seconds.
        costs: figures of the cost by name, one a column: means over its runs; None if unknown.
        options: options that differ, by name, one value a column.
        versions: of software, likewise.
        machines: ranks, hosts and devices, likewise.
        notes: what limits the comparison.
    """

    columns: Sequence[Sequence[str]]
    states: Sequence[str]
    rows: Sequence[Row]
    costs: Mapping[str, Sequence[float | None]]
    options: Mapping[str, Sequence[Any]]
    versions: Mapping[str, Sequence[Any]]
    machines: Mapping[str, Sequence[Any]]
    notes: Sequence[str]


def compare(runs: Sequence[RunRecord]) -> Comparison:
    """Compare runs with the first.

    Errors:
        ConfigError: a run has no figure in common with the first.
    """
    columns = group_by_seed(runs)
    rows = [row for axis in (SAMPLES, SECONDS) for row in _rows(columns, axis)]
    for number, column in enumerate(columns[1:], 1):
        if all(row.values[number] is None for row in rows):
            base, other = columns[0].first, column.first
            raise ConfigError(
                f"{other.path} and {base.path} cannot be compared: they have no loss or metric in common",
                expected="runs of one task, or with equal names of metrics",
                found=f"tasks {' in '.join(base.task)} and {' in '.join(other.task)}",
            )
    facts = [column.first.options for column in columns]
    plain = [{name: value for name, value in each.items() if name not in _PLACES} for each in facts]
    grouped = any(len(column.runs) > 1 for column in columns)
    options = {name: values for name, values in differing(columns, plain).items() if not (grouped and name == "seed")}
    return Comparison(
        columns=[[str(run.path) for run in column.runs] for column in columns],
        states=["; ".join(dict.fromkeys(run.state for run in column.runs)) for column in columns],
        rows=rows,
        costs=_costs(columns),
        options=options,
        versions=differing(columns, [as_mapping(column.first.started.get("versions")) for column in columns]),
        machines=differing(columns, [_machine(column.first) for column in columns]),
        notes=list(_notes(columns, rows)),
    )


def _rows(columns: Sequence[Column], axis: str) -> Iterator[Row]:
    alike = [column for column in columns if column.first.task == columns[0].first.task]
    curves = [run.losses[axis] for column in alike for run in column.runs]
    first, end = max(curve.first for curve in curves), min(float(curve.ends[-1]) for curve in curves)
    if len(alike) > 1 and end > first:
        yield _training_row(columns, axis, first, end)
    names = dict.fromkeys(name for column in columns for run in column.runs for name in run.evaluations)
    for name in names:
        having = [c for c in columns if all(name in r.evaluations for r in c.runs) and (name != HELD_OUT or c in alike)]
        if columns[0] in having and len(having) > 1:
            places = [run.evaluations[name][axis].places[-1] for column in having for run in column.runs]
            yield _evaluation_row(columns, having, name, axis, float(min(places)))


def _training_row(columns: Sequence[Column], axis: str, first: float, end: float) -> Row:
    """Compare the training losses before `end`, and not before `first`, where all runs have steps."""
    base = columns[0]
    low = max(first, end - max(WINDOW * end, LEAST_STEPS * base.first.losses[axis].usual_length))
    values = [_means(column, axis, low, end) if column.first.task == base.first.task else None for column in columns]
    differences: list[Estimate | None] = [None]
    sources = [NOTHING]
    for column, value in zip(columns[1:], values[1:], strict=True):
        found, source = _by_seeds(values[0], value)
        if found is not None and source == NOTHING:
            curves = (base.first.losses[axis], column.first.losses[axis])
            found, source = difference_by_noise(*curves, low, end), NOISE
        differences.append(found)
        sources.append(source)
    return Row(LOSS, axis, end, end - low, [_mean(each) for each in values], differences, sources)


def _evaluation_row(columns: Sequence[Column], having: Sequence[Column], name: str, axis: str, place: float) -> Row:
    values: list[list[float] | None] = []
    for column in columns:
        points = [run.evaluations[name][axis].at(place) for run in column.runs] if column in having else [None]
        known = [value for value in points if value is not None]
        values.append(known if len(known) == len(points) else None)
    pairs = [_by_seeds(values[0], value) for value in values[1:]]
    differences = [None, *(found for found, _ in pairs)]
    return Row(name, axis, place, 0.0, [_mean(each) for each in values], differences, [NOTHING, *(s for _, s in pairs)])


def _means(column: Column, axis: str, low: float, high: float) -> list[float] | None:
    found = [run.losses[axis].mean(low, high) for run in column.runs]
    known = [value for value in found if value is not None]
    return known if len(known) == len(found) else None


def _by_seeds(a: Sequence[float] | None, b: Sequence[float] | None) -> tuple[Estimate | None, str]:
    """Return the difference of means with its interval from seeds if there are several, else without one."""
    if not a or not b:
        return None, NOTHING
    if len(a) > 1 or len(b) > 1:
        return difference_by_seeds(a, b), SEEDS
    return (unknown(b[0] - a[0]), NOTHING) if len(a) == len(b) == 1 else (None, NOTHING)


def _mean(values: Sequence[float] | None) -> float | None:
    return float(np.mean(values)) if values else None


def _costs(columns: Sequence[Column]) -> dict[str, list[float | None]]:
    found: dict[str, list[float | None]] = {
        "seconds": [_mean([float(run.losses[SECONDS].ends[-1]) for run in column.runs]) for column in columns],
        "device_hours": [],
        "energy_kwh": [],
        "money": [],
    }
    for column in columns:
        known = [run.cost for run in column.runs if run.cost is not None]
        whole = known if len(known) == len(column.runs) else []
        energies, moneys = [cost.all_kwh for cost in whole], [cost.money for cost in whole]
        found["device_hours"].append(_mean([cost.device_hours for cost in whole]))
        for name, values in (("energy_kwh", energies), ("money", moneys)):
            numbers = [value for value in values if value is not None]
            found[name].append(_mean(numbers) if len(numbers) == len(column.runs) else None)
    return found


def _machine(run: RunRecord) -> dict[str, Any]:
    return {"ranks": run.started.get("size"), **flatten(as_mapping(run.started.get("machine")))}


def _notes(columns: Sequence[Column], rows: Sequence[Row]) -> Iterator[str]:
    base = columns[0]
    used = {source for row in rows for source in row.sources[1:]}
    if SEEDS in used:
        counts = " and ".join(str(len(column.runs)) for column in columns)
        single = any(len(column.runs) == 1 for column in columns)
        how = "Welch's; Student's next to a single run, which assumes equal spread" if single else "Welch's"
        yield f"intervals are from the seeds ({counts} runs): {how}"
    if NOISE in used:
        yield (
            "intervals are from the noise of the training curve, one run each: another seed may change a difference by"
            " more. One seed each proves little: train several seeds of each"
        )
    if any(row.window == 0 and NOTHING in row.sources[1:] for row in rows):
        yield "single evaluations have no interval"
    if len(columns) > 1 and all(differ_in_seed_only(base.first, column.first) for column in columns[1:]):
        yield "the runs differ only in their seed: their differences are what a seed changes"
    if any(column.first.task != base.first.task for column in columns[1:]):
        yield "the tasks differ: their losses are not compared, only metrics with equal names"
    kinds = {tuple(run.cost.energy_kwh) for column in columns for run in column.runs if run.cost is not None}
    if len(kinds) > 1:
        yield f"energy is not of the same parts: {'; '.join(sorted(' and '.join(kind) or 'none' for kind in kinds))}"
    reasons = dict.fromkeys(
        f"energy of {kind} not measured: {why}"
        for column in columns
        for run in column.runs
        if run.cost is not None
        for kind, why in run.cost.unmeasured.items()
    )
    yield from reasons
