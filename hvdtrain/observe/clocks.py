"""The clocks of all ranks on that of rank 0: equal where they are one clock, else by bounds that collectives give."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from hvdtrain.comm.base import Comm
from hvdtrain.observe.clock_fit import MAX_DRIFT, ClockFit, Offset

Floats = NDArray[np.float64]

AT_START, LATER = 24, 6
"""Probes: small allreduces, of some 0.3 ms each."""

EVERY_US = 30e6
"""Between probes: in the time between, clocks drift apart by some hundred microseconds where nothing else bounds it."""

_JITTER_S = 1e-3


class Clocks:
    """Which ranks share rank 0's clock, and the offsets of the others; one thread may probe while another asks.

    Args:
        comm: the ranks.
        ids: of each rank's clock (`hvdtrain.runtime.clock.clock_id`); equal ones are one clock.
        now_ns: this rank's clock.
        pause: waits so many seconds, so that ranks do not always come to a probe in the same order.
    """

    def __init__(
        self,
        comm: Comm,
        ids: Sequence[str],
        now_ns: Callable[[], int] = time.perf_counter_ns,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._comm = comm
        self._now_ns = now_ns
        self._pause = pause
        self._random = random.Random(comm.rank)
        self._groups = [[rank for rank, other in enumerate(ids) if other == one] for one in dict.fromkeys(ids)]
        self._of = {rank: number for number, group in enumerate(self._groups) for rank in group}
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
        """Whether it is time for more probes, as this rank's clock says; rank 0's counts."""
        return not self.shared and self._now_ns() / 1e3 - self._probed_us >= EVERY_US

    def probe(self, count: int) -> None:
        """Bound the offsets by `count` small allreduces; does nothing where all have one clock. Collective: yes."""
        if self.shared:
            return
        times = torch.empty(1, 2, count, dtype=torch.float64)
        token = torch.zeros(1)
        for number in range(count):
            self._pause(self._random.random() * _JITTER_S)
            times[0, 0, number] = self._now_ns() / 1e3
            self._comm.allreduce(token, name="timeline/probe").wait()
            times[0, 1, number] = self._now_ns() / 1e3
        everyone = self._comm.allgather(times, name="timeline/probes").wait().numpy()
        self._probed_us = self._now_ns() / 1e3
        for number in range(count):
            self.add_bounds(everyone[:, 0, number : number + 1], everyone[:, 1, number : number + 1])

    def add_bounds(self, sent_us: Floats, received_us: Floats) -> None:
        """Take bounds from collectives that followed each other soon.

        Args:
            sent_us: by the ranks' own clocks, when each had not yet joined [ranks, collectives].
            received_us: when each had seen its end [ranks, collectives].
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
        """What makes `time_us` of a rank's clock rank 0's, on rank 0; of an unknown one the error is infinite."""
        number = self._of[rank]
        if number == 0:
            return Offset(0.0, 0.0)
        with self._lock:
            found = self._fits[number].at(time_us)
        if found is None:  # bounds contradicted each other, a clock was slewed: what was known, less and less sure
            then_us, known = self._last.get(number, (time_us, Offset(0.0, float("inf"))))
            return Offset(known.us, known.error_us + MAX_DRIFT * abs(time_us - then_us))
        self._last[number] = (time_us, found)
        return found
