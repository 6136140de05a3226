"""The program that `hvdtrain doctor --hosts` runs on each host. It answers questions and ends with the doctor.

It reports facts about the host without importing torch or Horovod. Messages on stdin and stdout, in the format of
`hvdtrain.runtime.channel`. No port is opened unless requested:

    hello   {"path", "folder"}          the first message; the reply is  says {"facts"}
    ask     {"number", "what", ...}     the reply is  answer {"number", "value"}  or  answer {"number", "error"}

Probes of two hosts test their connection: one sends a token, which hosts receive only through the doctor, and the other
answers with its reverse.
"""

from __future__ import annotations

import errno
import os
import platform
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil

from hvdtrain import __version__
from hvdtrain.doctor.facts.installation import horovod_mismatch, mpi_versions, package_version
from hvdtrain.doctor.facts.machine import Interface, Limits, driver_version, gpu_models, interfaces, limits
from hvdtrain.files import read_text_or_empty
from hvdtrain.runtime.channel import MessageWriter, read_messages
from hvdtrain.runtime.environment import environ
from hvdtrain.runtime.host import HostFacts, read_host
from hvdtrain.runtime.interfaces import interface_of, source_to

CONNECT_S = 5.0
_WAIT_S = 20.0  # how long to wait for the next bytes of a connection
_TOKEN_BYTES = 32

LIFETIME_S = 600.0
"""A probe that loses its doctor, because the link is cut, ends after this time."""

_THREADS = 64
_VISIBLE_WITHIN_S = 3.0
"""How long a file written on one host may take to appear on another: network file systems cache their folders."""


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
        if secrets.compare_digest(_receive_token(connection), token.encode()):
            connection.sendall(_proof(token))


def try_connection(listener: Listener) -> str:
    """Connect to a listener and return the fault, as in `Attempt`."""
    try:
        with socket.create_connection((listener.address, listener.port), CONNECT_S) as end:
            end.sendall(listener.token.encode())
            return "" if _receive_token(end) == _proof(listener.token) else "stranger"
    except TimeoutError:
        return "timeout"
    except ConnectionRefusedError:
        return "refused"
    except OSError as error:
        if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
            return "route"
        return str(error)


def _proof(token: str) -> bytes:
    return token[::-1].encode()


def _receive_token(end: socket.socket) -> bytes:
    """Return as many bytes as a token has; fewer if the other end closes."""
    with end.makefile("rb") as file:
        return file.read(_TOKEN_BYTES)


@dataclass(frozen=True)
class HostReport:
    """Facts about a host, sent as JSON. A text is "" and a tuple is empty if there is nothing."""

    name: str  # host name of the system
    address: str  # that ssh connected to; "" for the doctor's own host
    hvdtrain: str  # its version, as for the other packages
    python: str
    torch: str
    horovod: str
    horovod_wrong: str  # why this Horovod cannot run on this host
    libmpi: str  # version of the MPI library that Horovod loads
    mpirun: str  # version of the mpirun on PATH, or next to Python
    kernel: str  # operating system
    machine: str  # processor type
    gpus: tuple[str, ...]  # models
    driver: str  # version of NVIDIA's driver
    host: HostFacts
    limits: Limits
    folder: bool  # whether the working folder exists
    interfaces: tuple[Interface, ...]  # with an IPv4 address, except the loopback


def report_host(environ: Mapping[str, str], folder: str) -> HostReport:
    """Gather the facts about this host, in a second or two. ``folder``: working folder of the ranks."""
    with ThreadPoolExecutor(2) as pool:
        mpi = mpi_versions(environ, pool, Path(sys.executable).parent)
    connection = environ.get("SSH_CONNECTION", "").split()
    return HostReport(
        name=platform.node(),
        address=connection[2] if len(connection) == 4 else "",
        hvdtrain=__version__,
        python=platform.python_version(),
        torch=package_version("torch") or "",
        horovod=package_version("horovod") or "",
        horovod_wrong=" ".join((horovod_mismatch() or "").split()) if package_version("horovod") else "",
        libmpi=mpi.library_version or "",
        mpirun=mpi.mpirun_version or "",
        kernel=f"{platform.system()} {platform.release()}",
        machine=platform.machine(),
        gpus=gpu_models(),
        driver=driver_version() or "",
        host=read_host(environ),
        limits=limits(),
        folder=Path(folder).is_dir(),
        interfaces=tuple(one for one in interfaces() if one.address and not one.loopback),
    )


def _reach(question: Mapping[str, Any]) -> dict[str, Attempt]:
    listeners = {name: Listener(**listener) for name, listener in question["doors"].items()}
    with ThreadPoolExecutor(_THREADS) as pool:
        faults = pool.map(try_connection, listeners.values())
    attempts = {}
    for (name, listener), fault in zip(listeners.items(), faults, strict=True):
        interface = interface_of(source_to(listener.address))
        state = psutil.net_if_stats().get(interface)
        attempts[name] = Attempt(fault, interface, state.mtu if state else 0)
    return attempts


def _sees_file(question: Mapping[str, Any]) -> bool:
    """Tell whether a file exists and has the expected content."""
    deadline_s = time.monotonic() + _VISIBLE_WITHIN_S
    while True:
        if read_text_or_empty(Path(question["file"])) == question["text"]:
            return True
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.1)


ANSWERS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "toward": lambda question: source_to(question["address"]),
    "listen": lambda question: listen(question["address"]),
    "reach": _reach,
    "write": lambda question: Path(question["file"]).write_text(question["text"]),
    "remove": lambda question: Path(question["file"]).unlink(missing_ok=True),
    "look": _sees_file,
}


def main(hello: Mapping[str, Any] | None = None) -> int:
    """Answer the doctor at the other end of stdin and stdout. `hello`: its first message, if already read."""
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keeps other output out of the messages
    limit = threading.Timer(LIFETIME_S, os._exit, (1,))
    limit.daemon = True
    limit.start()
    if hello is None:
        hello = next(read_messages(source), None)
    if hello is None or hello["type"] != "hello":
        sys.stderr.write("hvdtrain.doctor.hosts.host_probe is started by hvdtrain doctor, not by hand\n")
        return 2
    writer = MessageWriter(sink)
    writer.send("says", facts=msgspec.to_builtins(report_host(environ(), hello["folder"])))
    for question in read_messages(source):
        try:
            value = msgspec.to_builtins(ANSWERS[question["what"]](question))
            writer.send("answer", number=question["number"], value=value)
        except OSError as error:
            writer.send("answer", number=question["number"], error=str(error))
    sink.close()
    sys.stderr.flush()
    os._exit(0)  # does not wait for threads that listen


if __name__ == "__main__":
    sys.exit(main())
