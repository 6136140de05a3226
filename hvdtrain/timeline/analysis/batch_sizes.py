"""What it costs that ranks have batches of different sizes, such as texts of different lengths. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hvdtrain.timeline.analysis.analysis import Estimate
from hvdtrain.timeline.analysis.rank_steps import Rounds
from hvdtrain.timeline.analysis.stats import mean_of
from hvdtrain.timeline.columns import Floats, StepTable

_WORTH_MS, _WORTH_SHARE = 0.2, 0.01


@dataclass(frozen=True)
class BatchSizes:
    """The effect of sizes, which count elements of the largest tensor of a batch.

    Attributes:
        cost_ms: how much shorter a step would be if all ranks had equally much in it.
        ms_per_1000: time of 1,000 elements.
        more: by how much the largest size of a step exceeds the mean of the ranks, as a share: median over steps.
    """

    cost_ms: Estimate
    ms_per_1000: float
    more: float


def without_sizes(rounds: Rounds, table: StepTable) -> tuple[Rounds, BatchSizes | None]:
    """Return rounds with the times that ranks would have with batches of equal size, and the effect of sizes.

    The time of an element is the slope of a regression with fixed effects of ranks and steps, so that a slow rank or a
    slow step does not change it. Unless the low end of the cost's interval matters, rounds stay as they are.

    `rounds` are those of the stamps in `table`, which may lack sizes.
    """
    if not len(table.elements):
        return rounds, None
    work, elements = rounds.work_ms, table.elements[:, rounds.column]
    sizes, times = _within(elements), _within(work)
    power = float(np.sum(sizes**2))
    if power <= 0:
        return rounds, None
    slope = float(np.sum(sizes * times)) / power
    mean = elements.mean(axis=0)
    equal = work - slope * (elements - mean)
    cost = mean_of(work.max(axis=0) - equal.max(axis=0), rounds.weight)
    if slope <= 0 or cost.low < max(_WORTH_MS, _WORTH_SHARE * rounds.step_ms):
        return rounds, None
    more = float(np.median(elements.max(axis=0) / np.maximum(mean, 1e-9))) - 1
    return replace(rounds, work_ms=equal), BatchSizes(cost, 1e3 * slope, more)


def _within(values: Floats) -> Floats:
    """Return values without the means of their rows and columns."""
    found: Floats = values - values.mean(axis=0) - values.mean(axis=1, keepdims=True) + values.mean()
    return found
