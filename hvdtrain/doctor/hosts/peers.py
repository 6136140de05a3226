"""Connections between two hosts: a port that answers who knows its token, and what tries it from elsewhere.

A connection begins with the token, which goes from host to host by way of the doctor alone, and one letter:

    H   says that the other host has come, and ends
    E   gives 8 bytes back for 8 bytes, until the other end is closed
    S   takes what comes until the other end is closed, then tells in 8 bytes how many came
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
_WAIT_S = 20.0
"""For the next bytes of a connection."""
_BLOCK = bytes(1 << 18)
_TOKEN_BYTES = 32
_COUNT = struct.Struct("!Q")
_PINGS = 200
_WARM = 20


@dataclass(frozen=True)
class Door:
    """Where a host listens: on one address, on a port that the system chose."""

    address: str
    port: int
    token: str


@dataclass(frozen=True)
class Tried:
    """A connection that was tried.

    Attributes:
        fault: "" where it was made; else "timeout", "refused", "route", "stranger" or what the system says.
        interface, mtu: by which packets leave.
    """

    fault: str
    interface: str
    mtu: int


@dataclass(frozen=True)
class Speed:
    """Of one way between two hosts.

    Attributes:
        latency_s: of a few bytes, one way.
        bytes_per_s: of many.
    """

    latency_s: float
    bytes_per_s: float


def open_door(address: str) -> Door:
    """Listen on one address, in threads of their own, until this process ends.

    Errors:
        OSError: this host has no such address.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.create_server((address, 0), family=family, backlog=1024)
    door = Door(address, listening.getsockname()[1], secrets.token_hex(_TOKEN_BYTES // 2))

    def serve() -> None:
        while True:
            came, _ = listening.accept()
            threading.Thread(target=_answer, args=(came, door.token), daemon=True).start()

    threading.Thread(target=serve, name="door", daemon=True).start()
    return door


def _answer(came: socket.socket, token: str) -> None:
    with came, suppress(OSError):
        came.settimeout(_WAIT_S)
        came.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        said = _exactly(came, _TOKEN_BYTES + 1)
        if not secrets.compare_digest(said[:-1], token.encode()):
            return
        came.sendall(_proof(token))
        if said[-1:] == b"E":
            while ping := came.recv(_COUNT.size):
                came.sendall(ping)
        elif said[-1:] == b"S":
            count, room = 0, bytearray(len(_BLOCK))
            while size := came.recv_into(room):
                count += size
            came.sendall(_COUNT.pack(count))


def try_door(door: Door) -> str:
    """Go to a door and back; the fault, as `Tried` has it."""
    try:
        with _enter(door, b"H"):
            return ""
    except TimeoutError:
        return "timeout"
    except ConnectionRefusedError:
        return "refused"
    except OSError as error:
        if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
            return "route"
        return "stranger" if isinstance(error, _StrangerError) else str(error)


def measure(door: Door, budget_s: float) -> Speed:
    """How fast the way to a door is, in about the time that is given.

    Errors:
        OSError: nobody answers, or not any more.
    """
    with _enter(door, b"E") as end:
        taken: list[float] = []
        until_s = time.perf_counter() + budget_s / 2
        while len(taken) <= _WARM or (len(taken) < _PINGS and time.perf_counter() < until_s):
            before_s = time.perf_counter()
            end.sendall(bytes(_COUNT.size))
            _exactly(end, _COUNT.size)
            taken.append(time.perf_counter() - before_s)
    with _enter(door, b"S") as end:
        began_s = time.perf_counter()
        while time.perf_counter() - began_s < budget_s / 2:
            end.sendall(_BLOCK)
        end.shutdown(socket.SHUT_WR)
        (count,) = _COUNT.unpack(_exactly(end, _COUNT.size))
        took_s = time.perf_counter() - began_s
    return Speed(median(taken[_WARM:]) / 2, count / took_s)


class _StrangerError(OSError):
    """Something else answers there."""


def _enter(door: Door, letter: bytes) -> socket.socket:
    end = socket.create_connection((door.address, door.port), CONNECT_S)
    try:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.sendall(door.token.encode() + letter)
        if _exactly(end, _TOKEN_BYTES) != _proof(door.token):
            raise _StrangerError("something else answers there")
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
