"""What an allreduce takes between these ranks, by its size."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from hvdtrain.comm.base import Comm

SIZES = tuple(1 << exponent for exponent in (10, 12, 14, 16, 18, 20, 22, 23))
"""Bytes: 1 KiB to 4 MiB by fours, and 8 MiB."""

_TIMES = 2


def allreduce_s(comm: Comm, device: torch.device, elements: int, times: int, name: str) -> float:
    """Seconds of an allreduce of fp32 numbers: the least of some, after one that is not counted. Collective: yes."""
    tensor, together = torch.zeros(elements, device=device), torch.zeros(1)

    def once() -> None:
        comm.allreduce(tensor, name=name).wait()

    once()
    found = []
    for _ in range(times):
        comm.allreduce(together, name="link/together").wait()  # Horovod's Timeline is not whole after a barrier
        found.append(timed(once, device))
    return min(found)


def probe(comm: Comm, device: torch.device, budget_s: float) -> list[tuple[int, float]]:
    """Bytes and seconds of allreduces of growing sizes, as rank 0 measures them. Collective: yes.

    It ends before the size that would use up `budget_s`, by rank 0's clock; the two smallest are measured in any case.
    """
    found: list[tuple[int, float]] = []
    began_s = time.perf_counter()
    for size in SIZES:
        if len(found) >= 2:
            (before, fast_s), (last, slow_s) = found[-2:]
            expected_s = slow_s + max(0.0, slow_s - fast_s) * (size - last) / (last - before)
            over = time.perf_counter() - began_s + (_TIMES + 1) * expected_s > budget_s
            ends = torch.tensor([float(over)])
            if float(comm.broadcast(ends, name="link/ends").wait()):
                break
        found.append((size, allreduce_s(comm, device, size // 4, _TIMES, f"link/{size}")))
    return found


def timed(action: Callable[[], object], device: torch.device) -> float:
    """Seconds that `action` takes, and what it asks of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
