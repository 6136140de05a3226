"""Read the durations of allreduces from Horovod's Timeline."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import numpy as np

from hvdtrain.errors import HvdtrainError
from hvdtrain.run_layout import RunLayout, TimelineLayout
from hvdtrain.timeline.columns import HorovodTrace
from hvdtrain.timeline.read import read_horovod

_WHOLE, _OPERATION = "ALLREDUCE", "_ALLREDUCE"
"""The phase that has the size, and the suffix of phases that carry an allreduce out: MPI_ALLREDUCE, NCCL_ALLREDUCE."""


def read_allreduces(path: Path) -> list[tuple[int, float]]:
    """Return bytes and median seconds of allreduces in the newest window of a run; empty if none can be read."""
    files = sorted(RunLayout(path).timeline.folder.glob(TimelineLayout.HOROVOD), key=lambda file: file.stat().st_mtime)
    if not files:
        return []
    try:
        return _median_allreduces(read_horovod(files[-1]))
    except (HvdtrainError, OSError):
        return []


def _median_allreduces(trace: HorovodTrace) -> list[tuple[int, float]]:
    """Leave out the time that allreduces wait for late ranks."""
    sizes: dict[int, int] = {}
    seconds: dict[int, list[float]] = {}
    for tensor, phase, nbytes, us in zip(trace.tensor, trace.phase, trace.nbytes, trace.duration_us, strict=True):
        name = trace.phases[phase]
        if name == _WHOLE and nbytes > 0:
            sizes[int(tensor)] = int(nbytes)
        elif name.endswith(_OPERATION) and not name.startswith("NEGOTIATE"):
            seconds.setdefault(int(tensor), []).append(float(us) * 1e-6)
    found: dict[int, list[float]] = {}
    for tensor, durations in seconds.items():
        if tensor in sizes and np.isfinite(durations).all():
            found.setdefault(sizes[tensor], []).extend(durations)
    return [(size, median(durations)) for size, durations in sorted(found.items())]
