"""Detect network exposure of this rank's launcher, from the environment."""

from __future__ import annotations

from collections.abc import Mapping

from hvdtrain.runtime.environment import elastic

_ADDRESS, _PORT, _ELASTIC = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT", "HOROVOD_ELASTIC"


def describe_exposure(environ: Mapping[str, str]) -> str:
    """Describe the exposure of stock ``horovodrun --gloo``'s rendezvous and an alternative; "" where it is not used.

    Both of its servers bind all interfaces despite --network-interface (horovod/runner/util/network.py, find_port);
    that of an elastic job unpickles (horovod/runner/elastic/rendezvous.py). An address with a path is hvdtrain's own
    store: the path has the secret, and the store listens on one address only.
    """
    address = environ.get(_ADDRESS, "")
    if not address or elastic(environ) or "/" in address:
        return ""
    where = f"horovodrun's rendezvous server on {address}, port {environ.get(_PORT, '?')},"
    open_to_all = "listens on all interfaces of that host without authentication"
    if environ.get(_ELASTIC, "0") not in ("", "0"):
        return (
            f"{where} {open_to_all}; it unpickles its input: anybody who reaches the port can run code as this user"
            " (CVE-2024-10190, CVE-2026-31234). Use hvdtrain launch --elastic, which opens no port to a network, or"
            " close that port to other machines (SECURITY.md)"
        )
    return (
        f"{where} {open_to_all}: anybody who reaches the port can replace ranks' addresses. Use mpirun, or close that"
        " port to other machines (SECURITY.md)"
    )
