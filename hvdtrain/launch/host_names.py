"""Whether the names of hosts lead anywhere, before an MPI that cannot find one fills the screen."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterable, Sequence

from hvdtrain.programs import run_program

_TIMEOUT_S = 5.0
_BY_OTHERS = ("proxyjump ", "proxycommand ")
"""Of ssh's configuration: another machine looks the name up."""


def find_unknown_host(hosts: Iterable[str], ssh_arguments: Sequence[str] = ()) -> str | None:
    """The first host that has no address here, nor any other name or way in ssh's configuration; None where all have.

    Args:
        hosts: host or user@host.
        ssh_arguments: what ssh gets besides the host.
    """
    for host in hosts:
        if not _has_address(host.rpartition("@")[2]) and not _by_ssh(host, ssh_arguments):
            return host
    return None


def _has_address(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None))
    except OSError:
        return False


def _by_ssh(host: str, arguments: Sequence[str]) -> bool:
    if shutil.which("ssh") is None:
        return False
    try:
        lines = run_program(["ssh", *arguments, "-G", host], _TIMEOUT_S).out.splitlines()
    except TimeoutError:
        return True  # unknown: let the launcher try
    name = next((line.partition(" ")[2] for line in lines if line.startswith("hostname ")), "")
    return any(line.startswith(_BY_OTHERS) for line in lines) or (bool(name) and _has_address(name))
