"""Which processes share a clock, what the wall clock says at a moment of it, and a wall clock that never jumps."""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import NamedTuple

_LOOKS = 5
_BEGAN_S = time.time() - time.monotonic()


class Pair(NamedTuple):
    """One moment by two clocks, in microseconds.

    Attributes:
        epoch_us: since 1970, by the system's clock.
        monotonic_us: by `time.perf_counter_ns`.
    """

    epoch_us: float
    monotonic_us: float


def steady_s() -> float:
    """Seconds since 1970, by what the clock said when this process began, and by what has passed since.

    Somebody who sets the clock of a host, or a virtual machine that is moved, changes `time.time` by any amount; times
    in the records of a run go on.
    """
    return _BEGAN_S + time.monotonic()


def clock_id(root: Path = Path("/")) -> str:
    """What is equal in processes whose `time.perf_counter_ns` is one clock: the boot, and the time namespace.

    One that nobody else has where the system does not say. ``root``: the file system whose ``proc`` is asked.
    """
    try:
        boot = (root / "proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"unknown {uuid.uuid4()}"
    try:
        namespace = (root / "proc/self/ns/time").stat().st_ino
    except OSError:  # a kernel without them
        namespace = 0
    return f"{boot} {namespace}"


def moment() -> Pair:
    """Now, by both clocks; of a few looks the one that was least interrupted."""
    found: list[tuple[int, Pair]] = []
    for _ in range(_LOOKS):
        before = time.perf_counter_ns()
        epoch_ns = time.time_ns()
        after = time.perf_counter_ns()
        found.append((after - before, Pair(epoch_ns / 1e3, (before + after) / 2e3)))
    return min(found)[1]
