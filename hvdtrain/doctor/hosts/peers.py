"""Test connections between two hosts: a listener protected by a token, and the client that connects to it.

A connection begins with the token, which hosts receive only through the doctor, and one letter:

    E   echoes each 8 bytes, until the client closes; without any, this only checks the connection
    S   reads until the client closes, then sends the number of bytes in 8 bytes
"""

from __future__ import annotations

import errno
import secrets
import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from statistics import median

CONNECT_S = 5.0
_WAIT_S = 20.0  # how long to wait for the next bytes of a connection
_BLOCK = bytes(1 << 18)
_TOKEN_BYTES = 32
_COUNT = struct.Struct("!Q")
_PINGS = 200
_WARM = 20


@dataclass(frozen=True)
class Listener:
    """Where a host listens: one address, and a port that the system chose."""

    address: str
    port: int
    token: str


@dataclass(frozen=True)
class Attempt:
    """The result of a connection attempt."""

    fault: str  # "" if it succeeded; else "timeout", "refused", "route", "stranger" or the system's error
    interface: str  # of outgoing packets
    mtu: int  # largest packet of the interface in bytes


def listen(address: str) -> Listener:
    """Listen in background threads until this process ends. Errors: OSError if this host does not have the address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.create_server((address, 0), family=family, backlog=1024)
    listener = Listener(address, listening.getsockname()[1], secrets.token_hex(_TOKEN_BYTES // 2))

    def serve() -> None:
        while True:
            connection, _ = listening.accept()
            threading.Thread(target=_answer, args=(connection, listener.token), daemon=True).start()

    threading.Thread(target=serve, name="listener", daemon=True).start()
    return listener


def _answer(connection: socket.socket, token: str) -> None:
    with connection, suppress(OSError):
        connection.settimeout(_WAIT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        request = _exactly(connection, _TOKEN_BYTES + 1)
        if not secrets.compare_digest(request[:-1], token.encode()):
            return
        connection.sendall(_proof(token))
        if request[-1:] == b"E":
            while ping := connection.recv(_COUNT.size):
                connection.sendall(ping)
        elif request[-1:] == b"S":
            count, buffer = 0, bytearray(len(_BLOCK))
            while size := connection.recv_into(buffer):
                count += size
            connection.sendall(_COUNT.pack(count))


def try_connection(listener: Listener) -> str:
    """Connect to a listener and return the fault, as in `Attempt`."""
    try:
        with _connect(listener, b"E"):
            return ""
    except TimeoutError:
        return "timeout"
    except ConnectionRefusedError:
        return "refused"
    except OSError as error:
        if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
            return "route"
        return "stranger" if isinstance(error, _StrangerError) else str(error)


def measure(listener: Listener, budget_s: float) -> tuple[float, float]:
    """Measure the one-way time of a few bytes to a listener in seconds, and the bandwidth in bytes per second.

    It takes about `budget_s` seconds. Errors: OSError if the listener does not answer.
    """
    with _connect(listener, b"E") as end:
        times_s: list[float] = []
        deadline_s = time.perf_counter() + budget_s / 2
        while len(times_s) <= _WARM or (len(times_s) < _PINGS and time.perf_counter() < deadline_s):
            start_s = time.perf_counter()
            end.sendall(bytes(_COUNT.size))
            _exactly(end, _COUNT.size)
            times_s.append(time.perf_counter() - start_s)
    with _connect(listener, b"S") as end:
        start_s = time.perf_counter()
        while time.perf_counter() - start_s < budget_s / 2:
            end.sendall(_BLOCK)
        end.shutdown(socket.SHUT_WR)
        (count,) = _COUNT.unpack(_exactly(end, _COUNT.size))
        elapsed_s = time.perf_counter() - start_s
    return median(times_s[_WARM:]) / 2, count / elapsed_s


class _StrangerError(OSError):
    """Another program answers on that port."""


def _connect(listener: Listener, letter: bytes) -> socket.socket:
    end = socket.create_connection((listener.address, listener.port), CONNECT_S)
    try:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.sendall(listener.token.encode() + letter)
        if _exactly(end, _TOKEN_BYTES) != _proof(listener.token):
            raise _StrangerError("another program answers on that port")
        end.settimeout(_WAIT_S)
    except BaseException:
        end.close()
        raise
    return end


def _proof(token: str) -> bytes:
    return token[::-1].encode()


def _exactly(end: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = end.recv(size - len(found))
        if not part:
            raise _StrangerError("the connection was closed")
        found += part
    return found
