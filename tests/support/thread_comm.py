"""Ranks as threads of one process: any number of them, without MPI."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
_PATIENCE_S = 20.0


class _Meeting:
    """Where the ranks leave their parts of one collective; the result is made when the last has come."""

    def __init__(self, size: int) -> None:
        self.parts: list[Any] = [None] * size
        self.missing = size
        self.complete = threading.Event()


class Hub:
    """What the ranks share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._lock = threading.Lock()
        self._open: dict[str, list[_Meeting]] = {}
        self._round: dict[tuple[str, int], int] = {}

    def join(self, name: str, rank: int, part: Any) -> _Meeting:
        with self._lock:
            number = self._round.get((name, rank), 0)
            self._round[name, rank] = number + 1
            meetings = self._open.setdefault(name, [])
            while len(meetings) <= number:
                meetings.append(_Meeting(self.size))
            meeting = meetings[number]
            meeting.parts[rank] = part
            meeting.missing -= 1
            if meeting.missing == 0:
                meeting.complete.set()
        return meeting


class ThreadHandle:
    def __init__(self, meeting: _Meeting, result: Callable[[list[Any]], Tensor], over: Callable[[], object]) -> None:
        self._meeting = meeting
        self._over = over
        self._make = result
        self._result: Tensor | None = None

    def done(self) -> bool:
        return self._meeting.complete.is_set()

    def wait(self) -> Tensor:
        if self._result is None:
            assert self._meeting.complete.wait(_PATIENCE_S), "a rank never came to this collective"
            self._result = self._make(self._meeting.parts)
            self._over()
        return self._result


class ThreadComm:
    def __init__(self, hub: Hub, rank: int) -> None:
        self._hub = hub
        self.rank = self.local_rank = rank
        self.size = self.local_size = hub.size
        self.in_flight: dict[str, float] = {}

    def _start(self, kind: str, name: str, part: Any, result: Callable[[list[Any]], Tensor]) -> ThreadHandle:
        copy = part.clone() if isinstance(part, Tensor) else [p.clone() for p in part]
        self.in_flight[name] = time.monotonic()
        return ThreadHandle(
            self._hub.join(f"{kind}/{name}", self.rank, copy), result, lambda: self.in_flight.pop(name, None)
        )

    def allreduce(self, tensor: Tensor, *, name: str) -> ThreadHandle:
        return self._start("sum", name, tensor, lambda parts: tensor.copy_(_sum(parts)))

    def allgather(self, tensor: Tensor, *, name: str) -> ThreadHandle:
        return self._start("gather", name, tensor, torch.cat)

    def alltoall(self, tensor: Tensor, *, name: str, splits: list[int] | None = None) -> ThreadHandle:
        rows = splits or [len(tensor) // self.size] * self.size
        return self._start("all", name, tensor.split(rows), lambda parts: torch.cat([p[self.rank] for p in parts]))

    def reducescatter(self, tensor: Tensor, *, name: str) -> ThreadHandle:
        return self._start("scatter", name, tensor, lambda parts: torch.tensor_split(_sum(parts), self.size)[self.rank])

    def broadcast(self, tensor: Tensor, *, name: str, root: int = 0) -> ThreadHandle:
        return self._start("broadcast", name, tensor, lambda parts: tensor.copy_(parts[root]))

    def barrier(self) -> None:
        self._start("barrier", "", torch.zeros(0), _sum).wait()

    def close(self) -> None:
        pass


def _sum(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def on_ranks(size: int, body: Callable[[ThreadComm], T]) -> list[T]:
    """Run `body` on `size` ranks; their results in rank order. The first error of any is raised."""
    hub = Hub(size)
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(body, ThreadComm(hub, rank)) for rank in range(size)]
        return [future.result() for future in futures]
