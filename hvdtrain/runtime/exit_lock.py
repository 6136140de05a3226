"""Detect the death of a process before the kernel frees its memory, by a lock that the kernel releases.

After a kill, open files are closed and the parent is notified only when the memory is freed: 40 ms for a process with
torch, more with more memory. The kernel releases robust locks (`get_robust_list(2)`, `pthread_mutexattr_setrobust(3)`)
before that. The lock is in memory that both processes share. Linux only.
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
"""The variable with the file descriptor of the shared memory."""

_NAME = "lifeline"
_BYTES = mmap.PAGESIZE
_SHARED = _ROBUST = 1  # PTHREAD_PROCESS_SHARED, PTHREAD_MUTEX_ROBUST
_MOST_OF_ATTRIBUTES = 64

_libc = ctypes.CDLL(None)


class Lifeline:
    """A lock in shared memory. The descriptor of that memory may be closed afterwards."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, _BYTES)
        self._lock = ctypes.c_char.from_buffer(self._memory)

    def prepare(self) -> None:
        """Initialise the lock, unlocked. Errors: OSError."""
        attributes = ctypes.create_string_buffer(_MOST_OF_ATTRIBUTES)
        _check(_libc.pthread_mutexattr_init(attributes))
        _check(_libc.pthread_mutexattr_setpshared(attributes, _SHARED))
        _check(_libc.pthread_mutexattr_setrobust(attributes, _ROBUST))
        _check(_libc.pthread_mutex_init(ctypes.byref(self._lock), attributes))

    def hold(self) -> None:
        """Hold the lock until this thread ends, which must not be before the process ends. Errors: OSError."""
        _check(_libc.pthread_mutex_lock(ctypes.byref(self._lock)))

    def wait(self) -> bool:
        """Wait until the holder ends: killed, by itself, or by exec. Returns False if there was no holder."""
        return bool(_libc.pthread_mutex_lock(ctypes.byref(self._lock)) == errno.EOWNERDEAD)


def make_lifeline() -> tuple[Lifeline, int] | None:
    """Return a lifeline and the file descriptor for a child; None where the system does not support it."""
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
    """Hold the lifeline of this process, if its parent has given it one; return whether it does."""
    text = environ.get(VARIABLE, "")
    if not text.isdigit() or threading.current_thread() is not threading.main_thread():
        return False
    with suppress(OSError, ValueError):
        # Child programs inherit the variable, but may use the descriptor for another file.
        if not str(Path(f"/proc/self/fd/{text}").readlink()).startswith(f"/memfd:{_NAME} "):
            return False
        lifeline = Lifeline(int(text))
        os.close(int(text))
        lifeline.hold()
        # Keep it mapped after the interpreter's cleanup: the kernel reads the lock there.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(lifeline))
        return True
    return False


def _check(error: int) -> None:
    if error:
        raise OSError(error, os.strerror(error))
