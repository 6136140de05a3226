"""Measure the time of an allreduce between these ranks, by size."""

from __future__ import annotations

import time

import torch

from hvdtrain.comm.base import Comm

SIZES = tuple(1 << exponent for exponent in (10, 12, 14, 16, 18, 20, 22, 23))
"""Bytes: 1 KiB to 4 MiB in factors of four, and 8 MiB."""

_TIMES = 2


def probe_link(comm: Comm, device: torch.device, budget_s: float) -> list[tuple[int, float]]:
    """Return bytes and seconds of allreduces of growing sizes, as this rank measures them. Collective: yes.

    Ends before the size that would exceed `budget_s` by rank 0's clock, but always measures the two smallest sizes.
    """
    found: list[tuple[int, float]] = []
    began_s = time.perf_counter()
    for size in SIZES:
        if len(found) >= 2:
            (before, fast_s), (last, slow_s) = found[-2:]
            expected_s = slow_s + max(0.0, slow_s - fast_s) * (size - last) / (last - before)
            over = time.perf_counter() - began_s + (_TIMES + 1) * expected_s > budget_s
            if float(comm.broadcast(torch.tensor([float(over)]), name="link/ends").wait()):
                break
        found.append((size, _allreduce_s(comm, device, size)))
    return found


def _allreduce_s(comm: Comm, device: torch.device, size: int) -> float:
    """Return the minimum of several allreduces of fp32 numbers, after one that is not counted. Collective: yes."""
    tensor, number = torch.zeros(size // 4, device=device), torch.zeros(1)
    seconds = []
    for _ in range(_TIMES + 1):
        # Lines the ranks up. Not a barrier: after one, Horovod's Timeline is incomplete.
        comm.allreduce(number, name="link/together").wait()
        start_s = clock_s(device)
        comm.allreduce(tensor, name=f"link/{size}").wait()
        seconds.append(clock_s(device) - start_s)
    return min(seconds[1:])


def clock_s(device: torch.device) -> float:
    """Return the time in seconds when the device has finished all work given to it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
