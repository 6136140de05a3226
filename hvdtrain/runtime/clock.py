"""Clocks: which processes share one, the wall-clock time of a monotonic time, and a wall clock that never jumps."""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import NamedTuple

_LOOKS = 5
_BEGAN_S = time.time() - time.monotonic()


class Pair(NamedTuple):
    """One moment in microseconds: since 1970 by the system's clock, and by `time.perf_counter_ns`."""

    epoch_us: float
    monotonic_us: float


def steady_s() -> float:
    """Return seconds since 1970 that never jump: the system's clock at this process's start, plus monotonic time since.

    `time.time` jumps when somebody sets the clock or a virtual machine migrates; times in a run's records must not.
    """
    return _BEGAN_S + time.monotonic()


def clock_id(root: Path = Path("/")) -> str:
    """Return an id that is equal in processes with the same `time.perf_counter_ns`: the boot and the time namespace.

    It is unique where the system does not report them. ``root``: the root of the file system with ``proc``.
    """
    try:
        boot = (root / "proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"unknown {uuid.uuid4()}"
    try:
        namespace = (root / "proc/self/ns/time").stat().st_ino
    except OSError:  # a kernel without time namespaces
        namespace = 0
    return f"{boot} {namespace}"


def read_clocks() -> Pair:
    """Return the current time by both clocks: the least interrupted of a few readings."""
    found: list[tuple[int, Pair]] = []
    for _ in range(_LOOKS):
        before = time.perf_counter_ns()
        epoch_ns = time.time_ns()
        after = time.perf_counter_ns()
        found.append((after - before, Pair(epoch_ns / 1e3, (before + after) / 2e3)))
    return min(found)[1]
