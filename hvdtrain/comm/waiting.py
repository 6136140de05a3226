"""Detect from its stack whether a thread waits for other ranks."""

from __future__ import annotations

import sys
from types import FrameType

_WAITING_IN = ("hvdtrain.comm.horovod", "horovod.")
_INNERMOST = 3


def in_collective(frame: FrameType | None) -> bool:
    """Check whether one of the innermost frames is in the communicator."""
    for _ in range(_INNERMOST):
        if frame is not None and str(frame.f_globals.get("__name__", "")).startswith(_WAITING_IN):
            return True
        frame = frame.f_back if frame is not None else None
    return False


def waits_in_collective(thread: int) -> bool:
    """Check whether the thread with this identity waits in a collective. Call it from another thread."""
    return in_collective(sys._current_frames().get(thread))
