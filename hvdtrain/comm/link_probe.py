"""Measure the time of an allreduce between these ranks, by size."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from hvdtrain.comm.base import Comm

SIZES = tuple(1 << exponent for exponent in (10, 12, 14, 16, 18, 20, 22, 23, 24, 25, 26))
"""Bytes: 1 KiB to 4 MiB in factors of four, then up to 64 MiB. A link may pass some MiB at once, which do not show its
bandwidth; larger sizes do."""

_LARGE = 1 << 22
"""Bytes from which the mean counts: the first of several allreduces may use up what a link passes at once."""

MEASURED = "link/bytes/"
"""Beginning of the names of the allreduces that are measured."""

_TIMES = 2


def probe_link(
    comm: Comm, device: torch.device, budget_s: float, *, among: Comm | None = None, sizes: Sequence[int] = SIZES
) -> list[tuple[int, float]]:
    """Return bytes and seconds of allreduces of growing sizes, as this rank measures them. Collective: yes.

    Ends before the size that would exceed `budget_s` by rank 0's clock, but always measures the two smallest sizes.

    Args:
        comm: ranks that begin each allreduce together.
        device: of the tensors.
        budget_s: time limit in seconds.
        among: the ranks of each allreduce, a subset of `comm` that contains this one (default: `comm`).
        sizes: in bytes, ascending.
    """
    found: list[tuple[int, float]] = []
    slowest: list[tuple[int, float]] = []
    began_s = time.perf_counter()
    for size in sizes:
        if len(found) >= 2:
            (before, fast_s), (last, slow_s) = slowest[-2:]
            expected_s = slow_s + max(0.0, slow_s - fast_s) * (size - last) / (last - before)
            over = time.perf_counter() - began_s + (_TIMES + 1) * expected_s > budget_s
            if float(comm.broadcast(torch.tensor([float(over)]), name="link/ends").wait()):
                break
        seconds = _allreduce_s(comm, comm if among is None else among, device, size)
        found.append((size, seconds))
        if among is not None:  # other subsets may be slower
            seconds = float(comm.allgather(torch.tensor([seconds]), name="link/slowest").wait().max())
        slowest.append((size, seconds))
    return found


def _allreduce_s(comm: Comm, among: Comm, device: torch.device, size: int) -> float:
    """Return the time of an allreduce of fp32 numbers, after one that is not counted. Collective: yes.

    It is the minimum of several ones; their mean for large sizes.
    """
    tensor, number = torch.zeros(size // 4, device=device), torch.zeros(1)
    seconds = []
    for _ in range(_TIMES + 1):
        # Lines the ranks up. Not a barrier: after one, Horovod's Timeline is incomplete.
        comm.allreduce(number, name="link/together").wait()
        start_s = clock_s(device)
        among.allreduce(tensor, name=f"{MEASURED}{size}").wait()
        seconds.append(clock_s(device) - start_s)
    return sum(seconds[1:]) / _TIMES if size >= _LARGE else min(seconds[1:])


def clock_s(device: torch.device) -> float:
    """Return the time in seconds when the device has finished all work given to it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
