"""Find the workers of a host that compute. A worker that compiles, for example, may not send progress."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress

from hvdtrain.programs import read_stat

EVERY_S = 5.0
"""Between two measurements: each reads a file per process of this host."""

_BUSY = 0.25
"""Cores in use on average between two measurements; Horovod's threads use some hundredths while all ranks wait."""


def cpu_seconds(leaders: Collection[int]) -> dict[int, float]:
    """Return the CPU seconds of sessions, by the number of the process that leads each."""
    import psutil  # takes 30 ms, which only agents need

    used = dict.fromkeys(leaders, 0.0)
    for pid in psutil.pids():
        with suppress(OSError):  # it has ended
            stat = read_stat(pid)
            if stat.session in used:
                used[stat.session] += stat.cpu_s
    return used


class BusyWorkers:
    """Finds workers that compute, themselves or in processes that they started. Each worker leads a session."""

    def __init__(self, read: Callable[[Collection[int]], Mapping[int, float]] = cpu_seconds) -> None:
        self._read = read
        self._used: Mapping[int, float] = {}
        self._looked_s = 0.0

    def find_busy(self, workers: Mapping[int, int], now_s: float) -> list[int]:
        """Return the workers that have computed since the last measurement; none less than `EVERY_S` after it.

        `workers`: process numbers by the workers' numbers.
        """
        passed_s = now_s - self._looked_s
        if passed_s < EVERY_S:
            return []
        before, self._used, self._looked_s = self._used, self._read(set(workers.values())), now_s
        known = {number: pid for number, pid in workers.items() if pid in before}
        return [n for n, pid in known.items() if self._used[pid] - before[pid] >= _BUSY * passed_s]
