"""Connections of this process that others opened: which they are, and waking who waits on them. Linux only."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")


def open_sockets() -> dict[int, int]:
    """File descriptors of this process's sockets by inode: a number that is not given anew while they are open."""
    found = {}
    for entry in _DESCRIPTORS.iterdir():
        with suppress(OSError):  # the one by which this folder is read is gone by now
            target = str(entry.readlink())
            if target.startswith("socket:["):
                found[int(target[8:-1])] = int(entry.name)
    return found


def cut(inodes: Collection[int]) -> int:
    """Shut the TCP connections among these down for receiving; how many. Who waits on them gets an end of file.

    Sending goes on: Gloo tells nobody of a send that fails while it answers the other end, and who waits for it then
    waits until its timeout. They stay open: closing them is for who opened them. Other sockets are left alone.
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
