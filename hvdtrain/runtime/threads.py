"""Threads of this process: their CPU use and priority; wake threads that wait on sockets. Linux only."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")

_DESCRIPTORS = Path("/proc/self/fd")


def thread_ids(process: int | str = "self") -> frozenset[int]:
    """Return the kernel's ids of a process's threads; empty without ``/proc``, or if it has ended."""
    try:
        return frozenset(int(task.name) for task in (_PROC / str(process) / "task").iterdir())
    except OSError:
        return frozenset()


def read_busy_ns(thread: int) -> int:
    """Return how long a thread has run. Errors: OSError, ValueError if it has ended, or the kernel does not say it."""
    return int((_PROC / "self/task" / str(thread) / "schedstat").read_text().split()[0])


def lower_priority(threads: Iterable[int]) -> None:
    """Give threads the lowest priority, where possible: on a core that computes, they get about 1.5% of it."""
    for thread in threads:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, 19)


def lower_own_priority(nice: str) -> None:
    """Lower the priority of this thread, and of threads that it starts later, to at least `nice`.

    Does nothing where that is not possible, or `nice` is not a positive number.
    """
    with suppress(OSError, ValueError):
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, max(int(nice), os.getpriority(os.PRIO_PROCESS, thread)))


def open_sockets() -> dict[int, int]:
    """Return the file descriptors of this process's sockets by inode, which is unique while a socket is open."""
    found = {}
    for entry in _DESCRIPTORS.iterdir():
        with suppress(OSError):  # the descriptor for reading this folder is closed by now
            target = str(entry.readlink())
            if target.startswith("socket:["):
                found[int(target[8:-1])] = int(entry.name)
    return found


def shut_down_receiving(inodes: Collection[int]) -> int:
    """Shut down receiving on the TCP connections among `inodes`; return their number. Waiting threads get an EOF.

    Sending still works: Gloo reports no failed send while it answers the other end, and the waiting rank would wait
    until its timeout. The sockets stay open for their owner to close. Other sockets are not touched.
    """
    count = 0
    now = open_sockets()
    for inode in inodes:
        if inode in now:
            with suppress(OSError), socket.socket(fileno=os.dup(now[inode])) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                    connection.shutdown(socket.SHUT_RD)
                    count += 1
    return count
