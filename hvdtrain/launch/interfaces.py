"""Find the network interface by which this host reaches another. Linux only."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915
_ANY_PORT = 9


def interface_of(address: str) -> str:
    """Return the interface with an IP address, "" where there is none."""
    try:
        wanted = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return ""
    if wanted.is_loopback:
        return "lo"
    if wanted.version == 6:
        return _interface_of_6(wanted)
    names = (name for _, name in socket.if_nameindex())
    return next((name for name in names if address_of(name) == str(wanted)), "")


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
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            found = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(found[20:24])


def _interface_of_6(wanted: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return ""
    for fields in map(str.split, lines):
        if len(fields) == 6 and ipaddress.ip_address(bytes.fromhex(fields[0])) == wanted:
            return fields[5]
    return ""
