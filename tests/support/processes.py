"""Processes that tests start."""

from __future__ import annotations

from hvdtrain.programs import read_stat


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return read_stat(pid).state not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
