"""The step times of runs, or of Timelines of Horovod, as rows of a comparison: the step, its parts, late ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from hvdtrain.compare.comparison import STEPS, Comparison, Row, differing, unknown
from hvdtrain.errors import TraceError
from hvdtrain.timeline import wording
from hvdtrain.timeline.analysis.analyse import analyse
from hvdtrain.timeline.analysis.analysis import Analysis, Estimate
from hvdtrain.timeline.analysis.budget import EXCHANGE, OTHER_EXCHANGE
from hvdtrain.timeline.analysis.phases import PHASES
from hvdtrain.timeline.run import load

_NOTHING = Estimate(0.0, 0.0, 0.0)
_PIECES = (*PHASES, OTHER_EXCHANGE, EXCHANGE)
LATE = "late ranks"


def with_step_times(comparison: Comparison) -> Comparison:
    """Return a comparison of runs with rows of step times: of the first run of each column that can be analysed."""
    found: list[Analysis | None] = []
    for runs in comparison.columns:
        try:
            found.append(analyse(load(Path(runs[0]))))
        except TraceError:  # its losses can be compared all the same
            found.append(None)
    return replace(comparison, rows=[*comparison.rows, *step_rows(found)])


def step_rows(runs: Sequence[Analysis | None]) -> Iterator[Row]:
    """Yield rows in milliseconds a step, for runs with steps. Where one has no phases of the exchange, none has."""
    parts = [{part.name: part.ms for part in run.budget.parts} if run and run.budget else {} for run in runs]
    if any(EXCHANGE in each for each in parts):
        parts = [_pooled(each) for each in parts]
    found: list[dict[str, Estimate] | None] = []
    for run, own in zip(runs, parts, strict=True):
        if run is None or run.budget is None:
            found.append(None)
            continue
        late = wording.total([row.cost_ms for row in run.blame.ranks if row.rank in run.blame.late])
        found.append({"step": run.budget.step_ms, **own, LATE: late})
    for name in dict.fromkeys(name for each in found if each for name in each):
        values = [None if each is None else each.get(name, _NOTHING) for each in found]
        base, others = values[0], values[1:]
        if base is not None and any(others) and (name != LATE or any(each and each.value for each in values)):
            differences = [None if each is None else _difference(base, each) for each in others]
            numbers = [None if each is None else each.value for each in values]
            yield Row(name, STEPS, 0.0, 0.0, numbers, [None, *differences], [STEPS] * len(values))


def compare_timelines(paths: Sequence[Path]) -> Comparison:
    """Compare Timelines of Horovod with the first. Errors: TraceError: one cannot be read."""
    found = [analyse(load(path)) for path in paths]
    states = ["a Timeline" if each.budget else "no steps" for each in found]
    sizes = differing([{"ranks": each.size} for each in found])
    notes = ["a Timeline does not say with which options it was recorded"]
    return Comparison([[str(path)] for path in paths], states, list(step_rows(found)), {}, {}, {}, sizes, notes)


def _pooled(parts: dict[str, Estimate]) -> dict[str, Estimate]:
    """Merge the phases of the exchange into one part; with the widest possible interval."""
    pieces = [ms for name, ms in parts.items() if name in _PIECES]
    rest = {name: ms for name, ms in parts.items() if name not in _PIECES}
    return {**rest, EXCHANGE: wording.total(pieces)} if pieces else rest


def _difference(a: Estimate, b: Estimate) -> Estimate:
    """Return b - a: the intervals are of two independent means, so the squares of half widths add up."""
    middle = b.value - a.value
    if not all(each.low < each.high or not each.value for each in (a, b)):
        return unknown(middle)
    low = math.hypot(b.value - b.low, a.high - a.value)
    high = math.hypot(b.high - b.value, a.value - a.low)
    return Estimate(middle, middle - low, middle + high)
