"""Ranks as threads of one process: any number of them, without MPI.

One rank runs at a time, until it waits for the others in a collective. So each has torch's global generator to itself
from seeding it to using it, as in a process of its own.
"""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Lost(RuntimeError):
    """A collective that will never be complete: another rank failed, or all that are left wait for something else."""


class _Meeting:
    """Where the ranks leave their parts of one collective; it is complete when none is missing."""

    def __init__(self, size: int) -> None:
        self.parts: list[Any] = [None] * size
        self.missing = size


class Hub:
    """What the ranks share, and whose turn it is to run."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._turn = threading.Condition()
        self._open: dict[str, list[_Meeting]] = {}
        self._round: dict[tuple[str, int], int] = {}
        self._waiting: list[_Meeting] = []
        self._ended = 0
        self._failed = False

    @contextmanager
    def running(self, *, at_once: bool) -> Iterator[None]:
        """Around all that a rank does: it holds the turn, unless all run at once."""
        with nullcontext() if at_once else self._turn:
            try:
                yield
            except BaseException:
                self._failed = True
                raise
            finally:
                with self._turn:
                    self._ended += 1
                    self._turn.notify_all()

    def break_off(self) -> None:
        """Let every wait for a rank that has not come fail."""
        with self._turn:
            self._failed = True
            self._turn.notify_all()

    def join(self, name: str, rank: int, part: Any, size: int) -> _Meeting:
        with self._turn:
            number = self._round.get((name, rank), 0)
            self._round[name, rank] = number + 1
            meetings = self._open.setdefault(name, [])
            while len(meetings) <= number:
                meetings.append(_Meeting(size))
            meeting = meetings[number]
            meeting.parts[rank] = part
            meeting.missing -= 1
            self._turn.notify_all()
        return meeting

    def wait(self, meeting: _Meeting) -> None:
        """Let the others run until all have come.

        Errors:
            Lost: they never will.
        """
        with self._turn:
            self._waiting.append(meeting)
            self._turn.notify_all()
            self._turn.wait_for(lambda: not meeting.missing or self._failed or self._stuck())
            self._waiting.remove(meeting)
            if meeting.missing:
                raise Lost("a rank never came to this collective")

    def look(self, meeting: _Meeting) -> bool:
        """Let another rank run, where one can; whether all have come."""
        with self._turn:
            self._turn.wait(0.001)
            return not meeting.missing

    def _stuck(self) -> bool:
        return len(self._waiting) + self._ended >= self.size and all(one.missing for one in self._waiting)


@dataclass
class ThreadHandle:
    _hub: Hub
    _meeting: _Meeting
    _make: Callable[[list[Any]], Tensor]
    _over: Callable[[], object]
    _result: Tensor | None = None

    def done(self) -> bool:
        return self._result is not None or self._hub.look(self._meeting)

    def wait(self) -> Tensor:
        if self._result is None:
            self._hub.wait(self._meeting)
            self._result = self._make(self._meeting.parts)
            self._over()
        return self._result


class ThreadComm:
    def __init__(self, hub: Hub, rank: int, ranks: Sequence[int] | None = None) -> None:
        self._hub = hub
        self._ranks = list(range(hub.size)) if ranks is None else list(ranks)
        self.rank = self.local_rank = self._ranks.index(rank)
        self.size = self.local_size = len(self._ranks)
        self.in_flight: dict[str, float] = {}

    def _start(self, kind: str, name: str, part: Any, result: Callable[[list[Any]], Tensor]) -> ThreadHandle:
        copy = part.clone() if isinstance(part, Tensor) else [p.clone() for p in part]
        assert not any(p.is_complex() for p in ([copy] if isinstance(copy, Tensor) else copy)), "Horovod sums none"
        self.in_flight[name] = time.monotonic()
        meeting = self._hub.join(f"{self._ranks}/{kind}/{name}", self.rank, copy, self.size)
        return ThreadHandle(self._hub, meeting, result, lambda: self.in_flight.pop(name, None))

    def allreduce(self, tensor: Tensor, *, name: str) -> ThreadHandle:
        return self._start("sum", name, tensor, lambda parts: tensor.copy_(_sum(parts)))

    def allgather(self, tensor: Tensor, *, name: str) -> ThreadHandle:
        return self._start("gather", name, tensor, torch.cat)

    def alltoall(self, tensor: Tensor, *, name: str, rows: Sequence[int] | None = None) -> ThreadHandle:
        shares = tensor.split(list(rows) if rows is not None else len(tensor) // self.size)
        return self._start("all", name, shares, lambda parts: torch.cat([p[self.rank] for p in parts]))

    def reducescatter(self, tensor: Tensor, *, name: str) -> ThreadHandle:
        return self._start("scatter", name, tensor, lambda parts: torch.tensor_split(_sum(parts), self.size)[self.rank])

    def broadcast(self, tensor: Tensor, *, name: str, root: int = 0) -> ThreadHandle:
        return self._start("broadcast", name, tensor, lambda parts: tensor.copy_(parts[root]))

    def barrier(self) -> None:
        self._start("barrier", "", torch.zeros(0), _sum).wait()

    def subset(self, ranks: Sequence[int], local_rank: int, local_size: int) -> ThreadComm:
        found = ThreadComm(self._hub, self.rank, ranks)
        found.local_rank, found.local_size, found.in_flight = local_rank, local_size, self.in_flight
        return found

    def close(self) -> None:
        pass


def _sum(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def on_ranks(size: int, body: Callable[[ThreadComm], T], *, at_once: bool = False) -> list[T]:
    """Run `body` on `size` ranks; their results in rank order.

    The error of a rank that failed by itself is raised, not what follows from it on the others.

    Args:
        size: number of ranks.
        body: what each does.
        at_once: all run at the same time. For bodies that wait for each other elsewhere than in collectives.
    """
    hub = Hub(size)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def rank(number: int) -> None:
        try:
            with hub.running(at_once=at_once):
                results[number] = body(ThreadComm(hub, number))
        except BaseException as error:
            errors.append(error)

    # Daemons: one that never ends does not keep the tests from theirs.
    threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in sorted(errors, key=lambda error: isinstance(error, Lost)):
        raise error
    return [results[number] for number in range(size)]


def per_rank(size: int = 0) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let each of `size` ranks run a test, which gets its `comm`; 0: as many as the test's parameter `size` says."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        whole = inspect.signature(test)
        own = whole.replace(parameters=[each for name, each in whole.parameters.items() if name != "comm"])

        @functools.wraps(test)
        def run(*given: Any, **named: Any) -> None:
            arguments = own.bind(*given, **named).arguments
            on_ranks(size or arguments["size"], lambda comm: test(comm=comm, **arguments))

        run.__signature__ = own  # type: ignore[attr-defined]
        return run

    return decorate
