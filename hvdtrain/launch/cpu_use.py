"""Which workers of a host compute: seen from outside, as one that compiles may not say a word."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress

import psutil

from hvdtrain.processes import read_stat

EVERY_S = 5.0
"""Between two looks: each reads a file of every process of this host."""

_BUSY = 0.25
"""Of one core, over the time between two looks: Horovod's threads use some hundredths while all wait."""


def cpu_seconds(leaders: Collection[int]) -> dict[int, float]:
    """Seconds of the processor that sessions have used, by the number of the process that leads each."""
    used = dict.fromkeys(leaders, 0.0)
    for pid in psutil.pids():
        with suppress(OSError):  # it has ended
            stat = read_stat(pid)
            if stat.session in used:
                used[stat.session] += stat.cpu_s
    return used


class BusyWorkers:
    """Finds workers that compute, they or what they have started, such as compilers.

    Args:
        read: as `cpu_seconds`; each worker leads a session.
    """

    def __init__(self, read: Callable[[Collection[int]], Mapping[int, float]] = cpu_seconds) -> None:
        self._read = read
        self._used: Mapping[int, float] = {}
        self._looked_s = 0.0

    def find_busy(self, workers: Mapping[int, int], now_s: float) -> list[int]:
        """Numbers of the workers that have computed since the last look; nothing where that was just now.

        Args:
            workers: process numbers by the workers' own.
            now_s: of a clock that only goes forward.
        """
        passed_s = now_s - self._looked_s
        if passed_s < EVERY_S:
            return []
        before, self._used, self._looked_s = self._used, self._read(set(workers.values())), now_s
        known = {number: pid for number, pid in workers.items() if pid in before}
        return [n for n, pid in known.items() if self._used[pid] - before[pid] >= _BUSY * passed_s]
