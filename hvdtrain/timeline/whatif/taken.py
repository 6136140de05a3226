"""What allreduces took while the run trained, of Horovod's Timeline where it was recorded."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import numpy as np

from hvdtrain.errors import HvdtrainError
from hvdtrain.run_layout import RunLayout, TimelineLayout
from hvdtrain.timeline.columns import HorovodTrace
from hvdtrain.timeline.read import read_horovod

_WHOLE, _CARRIED_OUT = "ALLREDUCE", "_ALLREDUCE"
"""The phase that says how many bytes, and how those end that carry it out: MPI_ALLREDUCE, NCCL_ALLREDUCE."""


def taken(path: Path) -> list[tuple[int, float]]:
    """Bytes and median seconds of allreduces of a run's newest window; nothing where there is none that can be read."""
    files = sorted(RunLayout(path).timeline.folder.glob(TimelineLayout.HOROVOD), key=lambda file: file.stat().st_mtime)
    if not files:
        return []
    try:
        return of_trace(read_horovod(files[-1]))
    except (HvdtrainError, OSError):
        return []


def of_trace(trace: HorovodTrace) -> list[tuple[int, float]]:
    """The same of a trace. What a collective waits for ranks that are late is not in it."""
    sizes: dict[int, int] = {}
    seconds: dict[int, list[float]] = {}
    for tensor, phase, nbytes, us in zip(trace.tensor, trace.phase, trace.nbytes, trace.duration_us, strict=True):
        name = trace.phases[phase]
        if name == _WHOLE and nbytes > 0:
            sizes[int(tensor)] = int(nbytes)
        elif name.endswith(_CARRIED_OUT) and not name.startswith("NEGOTIATE"):
            seconds.setdefault(int(tensor), []).append(float(us) * 1e-6)
    found: dict[int, list[float]] = {}
    for tensor, durations in seconds.items():
        if tensor in sizes and np.isfinite(durations).all():
            found.setdefault(sizes[tensor], []).extend(durations)
    return [(size, median(durations)) for size, durations in sorted(found.items())]
