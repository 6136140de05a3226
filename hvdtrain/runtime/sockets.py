"""Find this process's sockets from other libraries, and wake threads that wait on them. Linux only."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")


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
