"""Horovod's Timelines as columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hvdtrain.timeline.columns import HorovodTrace


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
        now, place = turn.start_us, tensors.index(turn.tensor)
        begin = now
        for phase, duration in turn.phases.items():
            rows.append((place, phase, now, duration, -1))
            now += duration
            if phase.startswith("NEGOTIATE"):
                begin = now
        if turn.operation not in turn.phases:
            rows.append((place, turn.operation, begin, now - begin, turn.nbytes))
        ticks += [(us, place, rank) for rank, us in turn.ticks.items()]
    rows.sort(key=lambda row: row[2] + row[3])
    ticks.sort()
    phases = list(dict.fromkeys(row[1] for row in rows))
    number, phase, start_us, duration_us, nbytes = zip(*rows, strict=True) if rows else ((),) * 5
    tick_us, tick_tensor, tick_rank = zip(*ticks, strict=True) if ticks else ((),) * 3
    return HorovodTrace(
        Path("timeline.json"), None, tensors, phases,
        np.array(number, np.int32), np.array([phases.index(name) for name in phase], np.int16),
        np.array(start_us, float), np.array(duration_us, float), np.array(nbytes, np.int64),
        np.array(tick_tensor, np.int32), np.array(tick_rank, np.int32), np.array(tick_us, float),
    )  # fmt: skip
