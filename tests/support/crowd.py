"""Another user's program that holds connections to a job's store, and opens each that is closed anew.

    python crowd.py PID NUMBER

PID: of the driver, among whose children the store is found (an attacker would look into /proc/net/tcp). Every second
connection sends a byte of a request now and then. It writes "held" once all were open, and ends with its stdin.
"""

from __future__ import annotations

import select
import socket
import sys
import time
from contextlib import suppress

import psutil

_EVERY_S = 0.5


def port_of(driver: psutil.Process) -> int:
    """That the job listens on, which is waited for."""
    while True:
        with suppress(psutil.Error):
            for process in driver.children(recursive=True):
                for connection in process.net_connections("inet"):
                    if connection.status == "LISTEN":
                        return int(connection.laddr.port)
        time.sleep(0.01)


def main() -> None:
    port, number = port_of(psutil.Process(int(sys.argv[1]))), int(sys.argv[2])
    poll, held = select.epoll(), dict[int, socket.socket]()
    poll.register(0, select.EPOLLIN)
    dripped_s = opened = 0.0
    while True:
        while len(held) < number:
            try:
                one = socket.create_connection(("127.0.0.1", port))
            except OSError:
                return  # the job is over
            held[one.fileno()] = one
            poll.register(one, select.EPOLLIN)
            opened += 1
            if opened == number:
                print("held", flush=True)
        for file, _ in poll.poll(_EVERY_S):
            if file == 0:
                return
            held.pop(file).close()  # what comes is its end
        if time.monotonic() - dripped_s >= _EVERY_S:
            dripped_s = time.monotonic()
            for one in [*held.values()][::2]:
                with suppress(OSError):
                    one.send(b"G")


main()
