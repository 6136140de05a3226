"""Check a requirement of Horovod's Gloo: an address for this host's name."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from hvdtrain.errors import LaunchError


def refuse_without_address(variables: Mapping[str, str | None]) -> None:
    """Check that this host's name has an address where ranks meet by Gloo.

    Gloo resolves the name even if an interface is given, and does not handle a failure: each rank would die of SIGSEGV
    in hvd.init() (Horovod 0.28.1, gloo/transport/tcp/device.cc).

    Args:
        variables: the environment.

    Errors:
        LaunchError: it has none.
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
