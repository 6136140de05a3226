"""Find the network interface by which this host reaches another."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator

_ANY_PORT = 9


def interface_of(address: str) -> str:
    """Return the interface with an IP address, "" where there is none."""
    try:
        wanted = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return ""
    if wanted.is_loopback:
        return "lo"
    return next((name for name, found in _addresses() if found == wanted), "")


def interface_to(address: str) -> str:
    """Return the interface by which packets to an IP address leave, "" without a route. Sends nothing."""
    return interface_of(source_to(address))


def source_to(address: str) -> str:
    """Return this host's address for packets to an IP address, "" without a route. Sends nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((address, _ANY_PORT))
        except OSError:
            return ""
        return str(asking.getsockname()[0])


def address_of(interface: str) -> str:
    """Return the IPv4 address of an interface, "" where it has none or does not exist."""
    return next((str(found) for name, found in _addresses() if name == interface and found.version == 4), "")


def _addresses() -> Iterator[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    """Yield the interfaces of this host, each with one of its addresses."""
    import psutil  # takes 30 ms

    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                yield name, ipaddress.ip_address(entry.address.partition("%")[0])
