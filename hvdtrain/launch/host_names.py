"""Check host names before the start: an MPI that cannot resolve one fills the screen with errors."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterable, Sequence

from hvdtrain.programs import run_program

_TIMEOUT_S = 5.0
_BY_OTHERS = ("proxyjump ", "proxycommand ")
"""Options of ssh with which another machine resolves the name."""


def find_unknown_host(hosts: Iterable[str], ssh_arguments: Sequence[str] = ()) -> str | None:
    """Return the first host without an address here and without a name or proxy in ssh's configuration, or None.

    Args:
        hosts: host or user@host.
        ssh_arguments: arguments of ssh besides the host.
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
