"""Gloo: the address that Horovod's needs, the exposure of ``horovodrun --gloo``, the interface of torch's."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from hvdtrain.errors import LaunchError
from hvdtrain.runtime.environment import change_variables, elastic, environ
from hvdtrain.runtime.interfaces import interface_to

_TORCH_INTERFACE = "GLOO_SOCKET_IFNAME"


def refuse_without_address(variables: Mapping[str, str | None]) -> None:
    """Check that this host's name has an address where ranks meet by Gloo.

    Gloo resolves the name even if an interface is given, and does not handle a failure: each rank would die of SIGSEGV
    in hvd.init() (Horovod 0.28.1, gloo/transport/tcp/device.cc). Errors: LaunchError if it has none.
    """
    if int(variables.get("HOROVOD_SIZE") or 1) < 2:
        return
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        raise LaunchError(
            "this host's name has no address, and Horovod's Gloo crashes without one",
            expected=f"an address for {name}",
            found=str(error),
            next_step=f"echo '127.0.1.1 {name}' | sudo tee -a /etc/hosts (on several hosts: the address that others "
            "reach); or start by MPI, which does not need it: hvdtrain launch --to openmpi",
        ) from None


def describe_exposure(environ: Mapping[str, str]) -> str:
    """Describe the exposure of stock ``horovodrun --gloo``'s rendezvous and an alternative; "" where it is not used.

    Both of its servers bind all interfaces despite --network-interface (horovod/runner/util/network.py, find_port);
    that of an elastic job unpickles (horovod/runner/elastic/rendezvous.py). An address with a path is hvdtrain's own
    store: the path has the secret, and the store listens on one address only.
    """
    address, port = environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR", ""), environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT", "?")
    if not address or elastic(environ) or "/" in address:
        return ""
    risk = ": anybody who reaches the port can replace ranks' addresses. Use mpirun"
    if environ.get("HOROVOD_ELASTIC", "0") not in ("", "0"):
        risk = (
            "; it unpickles its input: anybody who reaches the port can run code as this user (CVE-2024-10190,"
            " CVE-2026-31234). Use hvdtrain launch --elastic, which opens no port to a network"
        )
    return (
        f"horovodrun's rendezvous server on {address}, port {port}, listens on all interfaces of that host without"
        f" authentication{risk}, or close that port to other machines (SECURITY.md)"
    )


def bind_torch(address: str) -> None:
    """Have torch's Gloo listen only on the interface towards `address`, unless the user has chosen one.

    Without this it listens at the address of this host's name, which may be that of another network, or 127.0.1.1.
    """
    interface = interface_to(address) if address else ""
    if interface and _TORCH_INTERFACE not in environ():
        change_variables({_TORCH_INTERFACE: interface})
