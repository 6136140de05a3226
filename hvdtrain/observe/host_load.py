"""Causes that delay a rank besides its own work: no free core, stolen CPU time, a slow GPU, a stopped process."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.observe.monitor import THROTTLES
from hvdtrain.spans import Listener

CAUSES = ("cpu_wait_us", "steal_us", "gpu_clock_mhz", "gpu_temperature_c", "gpu_throttle", "stopped_us")
"""Figures of a block of steps. Throttling is sent as bits of `monitor.THROTTLES`."""

_EVERY_S = 2.0
_TICK_S, _LATE_S, _MOST_OF_IT, _MOST_WAIT = 0.02, 0.05, 0.8, 0.5
"""A thread wakes each tick. If it is so late, the process was stopped, unless it computed or waited for a core then."""
ASIDE = ("evaluation", "checkpoint")
"""Spans that are no part of a step."""


class HostLoad(Listener):
    """Measures the causes for this rank. Constructed and read in the training thread, where it listens to `ASIDE`.

    Figures of the host and the GPU (`gpu` returns those of `Monitor.device`) may take long to read, so a thread of its
    own reads them every two seconds.
    """

    def __init__(self, gpu: Callable[[], Mapping[str, Any]], root: Path = Path("/")) -> None:
        self._gpu = gpu
        self._stat = root / "proc/stat"
        self._schedstat = root / f"proc/self/task/{threading.get_native_id()}/schedstat"
        self._lap = np.zeros(2)  # in steps: the training thread waited for a core, us, and the time, s
        self._began = self._now()
        self._busy = 0.0  # CPU seconds per second in the last tick that was in time
        self._sampled: tuple[float, float, float, float] = (math.nan,) * 4
        self._stopped_us = self._stopped_before_us = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="causes of lateness", daemon=True)
        self._thread.start()

    def read(self) -> list[float]:
        """Return `CAUSES` since the last call, NaN where unknown; waits only of steps. Takes some microseconds."""
        self.enter(ASIDE[0])
        self.exit(ASIDE[0])
        (since_us, since_s), self._lap = self._lap.tolist(), np.zeros(2)
        steal_share, *gpu = self._sampled
        stopped_us, self._stopped_before_us = self._stopped_us - self._stopped_before_us, self._stopped_us
        return [since_us, steal_share * since_s * 1e6, *gpu, stopped_us]

    def enter(self, name: str) -> None:
        """End the lap."""
        self._lap += self._now() - self._began

    def exit(self, name: str) -> None:
        """Begin the next one."""
        self._began = self._now()

    def _now(self) -> NDArray[np.float64]:
        return np.array([_delay_us(self._schedstat), time.monotonic()])

    def close(self) -> None:
        """Stop sampling. Does not wait for a thread that hangs in a driver."""
        self._ended.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        stolen, at_s = steal_s(self._stat), time.monotonic()
        while True:
            found = self._gpu()
            throttle = found.get("gpu_throttle")
            now, now_s = steal_s(self._stat), time.monotonic()
            self._sampled = (
                (now - stolen) / (now_s - at_s) if now_s - at_s > _EVERY_S / 2 else math.nan,
                float(found.get("gpu_clock_mhz", math.nan)),
                float(found.get("gpu_temperature_c", math.nan)),
                math.nan if throttle is None else float(sum(bit for bit, why in THROTTLES.items() if why in throttle)),
            )
            stolen, at_s = now, now_s
            while time.monotonic() - at_s < _EVERY_S:
                if self._tick():
                    return

    def _tick(self) -> bool:
        """Sleep for a tick, and note if the process was stopped meanwhile; return whether to end."""
        both = (Path("/proc/thread-self/schedstat"), self._schedstat)  # the training thread may hold the lock of Python
        began_s, busy_s, waited_us = time.monotonic(), time.process_time(), list(map(_delay_us, both))
        ended = self._ended.wait(_TICK_S)
        late_s, busy_s = time.monotonic() - began_s - _TICK_S, time.process_time() - busy_s
        if late_s <= _LATE_S:
            self._busy = busy_s / (_TICK_S + late_s)
        elif not ended:
            waits_s = np.nan_to_num(np.subtract(list(map(_delay_us, both)), waited_us)) / 1e6
            left_s, other_s = late_s - waits_s.max(), max(0.0, busy_s - self._busy * _TICK_S)
            if waits_s.sum() <= _MOST_WAIT * late_s and left_s - other_s > _MOST_OF_IT * left_s:
                self._stopped_us += 1e6 * float(left_s - other_s)
        return ended


def _delay_us(schedstat: Path) -> float:
    """Return how long a thread has waited for a core; NaN if unknown."""
    try:
        return int(schedstat.read_bytes().split()[1]) / 1e3
    except (OSError, ValueError, IndexError):
        return math.nan


def steal_s(stat: Path) -> float:
    """Return the stolen CPU time of this virtual machine in seconds, summed over cores; NaN if unknown."""
    try:
        with stat.open() as file:
            return int(file.readline().split()[8]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return math.nan


def throttle_text(bits: float) -> str | None:
    """Return the reasons for a lowered GPU clock; empty if it is not lowered, None if unknown."""
    return None if math.isnan(bits) else ", ".join(why for bit, why in THROTTLES.items() if int(bits) & bit)
