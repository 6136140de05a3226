"""Convert times of all ranks to rank 0's clock. Ranks share a clock, or collectives bound its offset."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hvdtrain.comm.base import Comm
from hvdtrain.observe.clock_fit import MAX_DRIFT, ClockFit, Floats, Offset

AT_START, LATER = 24, 6
"""Probes at the start of a run and later: small all-reduces of about 0.3 ms."""

EVERY_US = 30e6
"""Time between probes: without other bounds, clocks drift apart by some hundred microseconds in it."""

_JITTER_S = 1e-3


@dataclass
class Clocks:
    """Finds offsets to rank 0's clock. One thread may probe while another one asks for offsets."""

    comm: Comm
    ids: Sequence[str]  # of the ranks' clocks (`hvdtrain.runtime.clock.clock_id`); ranks with equal ones share a clock
    now_ns: Callable[[], int] = time.perf_counter_ns  # this rank's clock
    pause: Callable[[float], None] = time.sleep  # sleeps, so that ranks begin probes in different orders

    def __post_init__(self) -> None:
        self._random = random.Random(self.comm.rank)
        ids = self.ids
        self._groups = [[rank for rank, other in enumerate(ids) if other == one] for one in dict.fromkeys(ids)]
        self._group_number = {rank: number for number, group in enumerate(self._groups) for rank in group}
        self._fits = [ClockFit() for _ in self._groups]
        self._last: dict[int, tuple[float, Offset]] = {}
        self._probed_us = -EVERY_US
        self._lock = threading.Lock()

    @property
    def shared(self) -> bool:
        """Whether all ranks have one clock."""
        return len(self._groups) == 1

    @property
    def due(self) -> bool:
        """Whether more probes are due by this rank's clock. The answer of rank 0 counts."""
        return not self.shared and self.now_ns() / 1e3 - self._probed_us >= EVERY_US

    def probe(self, count: int) -> None:
        """Bound the offsets by `count` small all-reduces; nothing where all ranks share a clock. Collective: yes."""
        if self.shared:
            return
        times = torch.empty(1, 2, count, dtype=torch.float64)
        token = torch.zeros(1)
        for number in range(count):
            self.pause(self._random.random() * _JITTER_S)
            times[0, 0, number] = self.now_ns() / 1e3
            self.comm.allreduce(token, name="timeline/probe").wait()
            times[0, 1, number] = self.now_ns() / 1e3
        everyone = self.comm.allgather(times, name="timeline/probes").wait().numpy()
        self._probed_us = self.now_ns() / 1e3
        for number in range(count):
            self.add_bounds(everyone[:, 0, number : number + 1], everyone[:, 1, number : number + 1])

    def add_bounds(self, sent_us: Floats, received_us: Floats) -> None:
        """Add bounds from some consecutive collectives. Times are by the ranks' own clocks.

        Args:
            sent_us: times before each rank joined [ranks, collectives].
            received_us: times after each rank had the result [ranks, collectives].
        """
        ours = self._groups[0]
        for fit, group in zip(self._fits[1:], self._groups[1:], strict=True):
            sent, received = sent_us[group].max(axis=0), received_us[group].min(axis=0)
            most = received_us[ours].min(axis=0) - sent
            least = sent_us[ours].max(axis=0) - received
            with self._lock:
                if np.isfinite(most).any():
                    best = int(np.nanargmin(most))
                    fit.at_most(float(sent[best]), float(most[best]))
                if np.isfinite(least).any():
                    best = int(np.nanargmax(least))
                    fit.at_least(float(received[best]), float(least[best]))

    def offset(self, rank: int, time_us: float) -> Offset:
        """Return the offset that converts `time_us` of a rank's clock to rank 0's. Infinite error if unknown."""
        number = self._group_number[rank]
        if number == 0:
            return Offset(0.0, 0.0)
        with self._lock:
            found = self._fits[number].at(time_us)
        if found is None:  # bounds contradict each other, a clock was slewed: the last offset with a growing error
            then_us, known = self._last.get(number, (time_us, Offset(0.0, float("inf"))))
            return Offset(known.us, known.error_us + MAX_DRIFT * abs(time_us - then_us))
        self._last[number] = (time_us, found)
        return found
