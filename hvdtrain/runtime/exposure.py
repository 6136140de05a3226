"""What the launcher of this rank leaves open to others, by what it has set in the environment."""

from __future__ import annotations

from collections.abc import Mapping

from hvdtrain.runtime.environment import elastic

_ADDRESS, _PORT, _ELASTIC = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT", "HOROVOD_ELASTIC"


def exposed(environ: Mapping[str, str]) -> str:
    """What the rendezvous of stock ``horovodrun --gloo`` exposes, and what to use instead; "" where it is not used.

    Both of its servers bind all interfaces whatever --network-interface says (horovod/runner/util/network.py,
    find_port); that of an elastic job unpickles (horovod/runner/elastic/rendezvous.py). A path in the address is
    ours: it holds the secret of a store that listens on one address alone.
    """
    address = environ.get(_ADDRESS, "")
    if not address or elastic(environ) or "/" in address:
        return ""
    where = f"horovodrun's rendezvous server on {address}, port {environ.get(_PORT, '?')},"
    open_to_all = "listens on all interfaces of that host and asks nobody who he is"
    if environ.get(_ELASTIC, "0") not in ("", "0"):
        return (
            f"{where} {open_to_all}; it unpickles what is sent to it: whoever reaches the port runs code as this user"
            " (CVE-2024-10190, CVE-2026-31234). Use hvdtrain launch --elastic, which opens no port to a network, or"
            " close that port to other machines (SECURITY.md)"
        )
    return (
        f"{where} {open_to_all}: whoever reaches the port can replace the ranks' addresses. Use mpirun, or close that"
        " port to other machines (SECURITY.md)"
    )
