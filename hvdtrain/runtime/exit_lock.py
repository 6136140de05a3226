"""Word that a process ends, before its memory is freed: a lock that the kernel lets go of for it.

What a process that was killed has open is closed, and its parent told, only when its memory was taken back: 40 ms for
one that has imported torch, and longer the more it holds. Locks of the robust kind (`get_robust_list(2)`,
`pthread_mutexattr_setrobust(3)`) are let go of before. One lies in memory that both processes share. Linux only.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

VARIABLE = "HVDTRAIN_LIFELINE"
"""Names the file descriptor of the shared memory."""

_NAME = "lifeline"
_BYTES = mmap.PAGESIZE
_SHARED = _ROBUST = 1  # PTHREAD_PROCESS_SHARED, PTHREAD_MUTEX_ROBUST
_MOST_OF_ATTRIBUTES = 64

_libc = ctypes.CDLL(None)


class Lifeline:
    """A lock in shared memory.

    Args:
        descriptor: of that memory; it may be closed afterwards.
    """

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, _BYTES)
        self._lock = ctypes.c_char.from_buffer(self._memory)

    def prepare(self) -> None:
        """Make the lock, which nobody holds yet. Errors: OSError."""
        attributes = ctypes.create_string_buffer(_MOST_OF_ATTRIBUTES)
        _check(_libc.pthread_mutexattr_init(attributes))
        _check(_libc.pthread_mutexattr_setpshared(attributes, _SHARED))
        _check(_libc.pthread_mutexattr_setrobust(attributes, _ROBUST))
        _check(_libc.pthread_mutex_init(ctypes.byref(self._lock), attributes))

    def hold(self) -> None:
        """Hold it to the end of this thread, which is not to be other than that of the process. Errors: OSError."""
        _check(_libc.pthread_mutex_lock(ctypes.byref(self._lock)))

    def wait(self) -> bool:
        """Wait until who holds it has begun to end: killed, by itself, or to run another program; False if none did."""
        return bool(_libc.pthread_mutex_lock(ctypes.byref(self._lock)) == errno.EOWNERDEAD)


def make_lifeline() -> tuple[Lifeline, int] | None:
    """A lifeline, and the file descriptor by which a child gets it; None where this system has none."""
    with suppress(OSError, AttributeError):
        descriptor = os.memfd_create(_NAME)
        try:
            os.ftruncate(descriptor, _BYTES)
            lifeline = Lifeline(descriptor)
            lifeline.prepare()
        except BaseException:
            os.close(descriptor)
            raise
        return lifeline, descriptor
    return None


def hold_lifeline(environ: Mapping[str, str]) -> bool:
    """Hold the lifeline of this process, if who started it has given it one; whether that is so."""
    text = environ.get(VARIABLE, "")
    if not text.isdigit() or threading.current_thread() is not threading.main_thread():
        return False
    with suppress(OSError, ValueError):
        # Programs that this one starts inherit the variable, and what else they have under the number is not for locks.
        if not str(Path(f"/proc/self/fd/{text}").readlink()).startswith(f"/memfd:{_NAME} "):
            return False
        lifeline = Lifeline(int(text))
        os.close(int(text))
        lifeline.hold()
        # It stays mapped when the interpreter has cleared all else away: there the kernel looks for the lock.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(lifeline))
        return True
    return False


def _check(error: int) -> None:
    if error:
        raise OSError(error, os.strerror(error))
