"""A deadline for the ranks of a job: when it comes, rank 0 learns which ranks still report."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from hvdtrain.comm.link_probe import MEASURED

if TYPE_CHECKING:
    from torch.distributed import Store

_EVERY_S = 0.5
_LISTEN_S = 3.0
"""At the deadline, rank 0 waits this long for further reports."""
_OTHERS_S = 10.0
"""The other ranks end this much later, so that a launcher does not end rank 0 before it has reported."""


class Deadline:
    """Calls `on_end` in a thread, unless closed in time.

    Args:
        seconds: from now.
        rank: of this process.
        on_end: gets the ranks that still report, and whether each waits in a measurement; on ranks other than 0, and
            before `connect`, None. Then the collectives that each rank has last reported as running.
    """

    def __init__(
        self, seconds: float, rank: int, on_end: Callable[[dict[int, bool] | None, dict[int, list[str]]], None]
    ) -> None:
        self._until_s = time.monotonic() + seconds + (_OTHERS_S if rank else 0.0)
        self._rank, self._on_end = rank, on_end
        self._link: tuple[Store, int, Mapping[str, float]] | None = None
        self._ended = threading.Event()
        self._count = 0
        threading.Thread(target=self._run, name="preflight deadline", daemon=True).start()

    def connect(self, store: Store, size: int, in_flight: Mapping[str, float]) -> None:
        """Begin to report to `store`, which works when collectives hang. `in_flight`: the names of those that run."""
        self._link = store, size, in_flight

    def close(self) -> None:
        """Cancel the deadline."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(_EVERY_S):
            if self._link is not None:
                with suppress(RuntimeError):  # a rank has ended, and the store with it
                    self._report(self._link[0], self._link[2])
            if time.monotonic() > self._until_s:
                alive: dict[int, bool] | None = None
                running: dict[int, list[str]] = {}
                if self._link is not None and self._rank == 0:
                    alive, running = self._listen(*self._link)
                if not self._ended.is_set():
                    self._on_end(alive, running)
                return

    def _report(self, store: Store, in_flight: Mapping[str, float]) -> None:
        self._count += 1
        store.set(f"preflight/{self._rank}", json.dumps([self._count, list(in_flight)]))

    def _listen(
        self, store: Store, size: int, in_flight: Mapping[str, float]
    ) -> tuple[dict[int, bool], dict[int, list[str]]]:
        before = _reports(store, size)
        self._ended.wait(_LISTEN_S)
        self._report(store, in_flight)
        now = _reports(store, size)
        running = {rank: report[1] for rank, report in now.items()}
        alive = {
            rank: any(name.startswith(MEASURED) for name in running[rank])
            for rank, report in now.items()
            if report != before.get(rank)
        }
        return alive, running


def _reports(store: Store, size: int) -> dict[int, list[Any]]:
    keys = {rank: f"preflight/{rank}" for rank in range(size)}
    return {rank: json.loads(store.get(key)) for rank, key in keys.items() if store.check([key])}
