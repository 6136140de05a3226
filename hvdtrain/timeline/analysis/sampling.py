"""Weights of the recorded steps of a run. Stamps become sparser during a long run. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hvdtrain.timeline.analysis.rank_steps import warm_up
from hvdtrain.timeline.columns import Floats, Ints, StepTable


@dataclass(frozen=True)
class Sample:
    """The steps of a table that an analysis uses.

    Attributes:
        columns: of the table [n].
        begin_us: end of the step before; if it has no stamps, the start of the evaluations after it [ranks, n].
        aside_us: evaluations and checkpoints since the step before [ranks, n].
        steps: number of steps since the previous one in the sample; 1 for the first [n].
        weights: number of steps that each represents. A gap between two stretches counts half to each [n].
    """

    columns: Ints
    begin_us: Floats
    aside_us: Floats
    steps: Floats
    weights: Floats


def sample_of(table: StepTable) -> Sample:
    """Return the steps recorded by all ranks, without warm-up. Work before a start's first step belongs to no step."""
    moments = (table.start_us, table.ready_us, table.released_us, table.end_us)
    known = np.flatnonzero(np.isfinite(moments).all(axis=(0, 1)))
    end = table.end_us[:, known]
    aside = np.nan_to_num(table.parts_us.get("aside", np.zeros_like(table.end_us))[:, known])
    aside[:, known == 0] = 0.0
    follows = np.concatenate([[False], np.diff(table.step[known]) == 1])[: len(known)]
    begin = np.where(follows, np.roll(end, 1, axis=1), table.start_us[:, known] - aside)
    late = known >= warm_up(table)
    columns = known[late]
    steps = np.append(1.0, np.diff(table.step[columns]))[: len(columns)]
    return Sample(columns.astype(np.int32), begin[:, late], aside[:, late], steps, _weights(steps))


def _weights(steps: Floats) -> Floats:
    stretch = np.cumsum(steps > 1)
    if not len(steps):
        return np.zeros(0)
    counts = np.bincount(stretch)
    between = (steps[steps > 1] - 1) / 2
    stands = counts + np.append(0.0, between) + np.append(between, 0.0)
    found: Floats = (stands / counts)[stretch]
    return found
