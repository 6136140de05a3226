"""Horovod's Timelines as columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hvdtrain.timeline.columns import BucketFacts, HorovodTrace, RankSpans


@dataclass(frozen=True)
class Turn:
    """One collective: its phases follow each other; ticks by rank, in microseconds."""

    tensor: str
    start_us: float
    phases: Mapping[str, float]
    nbytes: int = -1
    ticks: Mapping[int, float] = field(default_factory=dict)
    operation: str = "ALLREDUCE"


def trace_of(turns: Sequence[Turn]) -> HorovodTrace:
    tensors = list(dict.fromkeys(turn.tensor for turn in turns))
    rows: list[tuple[int, str, float, float, int]] = []
    ticks: list[tuple[float, int, int]] = []
    for turn in turns:
        now, number = turn.start_us, tensors.index(turn.tensor)
        begin = now
        for phase, duration in turn.phases.items():
            rows.append((number, phase, now, duration, -1))
            now += duration
            if phase.startswith("NEGOTIATE"):
                begin = now
        if turn.operation not in turn.phases:
            rows.append((number, turn.operation, begin, now - begin, turn.nbytes))
        ticks += [(us, number, rank) for rank, us in turn.ticks.items()]
    rows.sort(key=lambda row: row[2] + row[3])
    ticks.sort()
    phases = list(dict.fromkeys(row[1] for row in rows))
    return HorovodTrace(
        Path("timeline.json"),
        None,
        tensors,
        phases,
        np.array([row[0] for row in rows], np.int32),
        np.array([phases.index(row[1]) for row in rows], np.int16),
        np.array([row[2] for row in rows], float),
        np.array([row[3] for row in rows], float),
        np.array([row[4] for row in rows], np.int64),
        np.array([tick[1] for tick in ticks], np.int32),
        np.array([tick[2] for tick in ticks], np.int32),
        np.array([tick[0] for tick in ticks], float),
    )


Row = tuple[str, int, int, float, float]
"""A span of a rank: name, track, step, start and end in ms."""


def spans_of(rows: Sequence[Row], rank: int = 0, facts: Mapping[int, BucketFacts] | None = None) -> RankSpans:
    names = list(dict.fromkeys(row[0] for row in rows))
    return RankSpans(
        rank,
        "host0",
        names,
        np.array([names.index(row[0]) for row in rows], np.int16),
        np.array([row[1] for row in rows], np.int32),
        np.array([row[2] for row in rows], np.int32),
        np.array([row[3] for row in rows], float) * 1e3,
        np.array([row[4] for row in rows], float) * 1e3,
        dict(facts or {}),
    )
