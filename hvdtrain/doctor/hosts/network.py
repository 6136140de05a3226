"""What a host's network is, and connections tried by it. Linux."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.launch.interfaces import interface_to

_SIOCGIFADDR, _SIOCGIFNETMASK, _SIOCGIFMTU = 0x8915, 0x891B, 0x8921
_NET = Path("/sys/class/net")


@dataclass(frozen=True)
class Interface:
    """A network interface with an IPv4 address.

    Attributes:
        name: of the kernel.
        address: its first.
        network: which it belongs to, as ``10.0.0.0/24``.
        mtu: bytes of a packet, at most.
        mbit: bits a second that its plug has agreed on, in millions; 0 where there is none, or it does not tell.
    """

    name: str
    address: str
    network: str
    mtu: int
    mbit: int


def interfaces() -> list[Interface]:
    """Those of this host, but the loopback."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                address, mask = (_address(asking, request, name) for request in (_SIOCGIFADDR, _SIOCGIFNETMASK))
            except OSError:
                continue
            if not ipaddress.ip_address(address).is_loopback:
                network = ipaddress.ip_network(f"{address}/{mask}", strict=False)
                found.append(Interface(name, address, str(network), mtu_of(name), _mbit(name)))
    return found


def address_toward(other: str) -> str:
    """The address by which this host would speak to another; "" where there is no route. Nothing is sent."""
    family = socket.AF_INET6 if ":" in other else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((other, 9))
        except OSError:
            return ""
        return str(asking.getsockname()[0])


def route_to(address: str) -> tuple[str, int]:
    """The interface by which packets to an address leave, and its MTU; "" and 0 where there is none."""
    name = interface_to(address)
    return name, mtu_of(name) if name else 0


def mtu_of(name: str) -> int:
    """Bytes of a packet, at most; 0 where it is not known."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            return int(struct.unpack_from("i", _ask(asking, _SIOCGIFMTU, name), 16)[0])
        except OSError:
            return 0


def _mbit(name: str) -> int:
    """Of real hardware alone: what a virtual interface says of its speed means nothing."""
    folder = _NET / name
    try:
        return max(0, int((folder / "speed").read_text())) if (folder / "device").exists() else 0
    except (OSError, ValueError):
        return 0


def _address(asking: socket.socket, request: int, name: str) -> str:
    return str(ipaddress.ip_address(_ask(asking, request, name)[20:24]))


def _ask(asking: socket.socket, request: int, name: str) -> bytes:
    """What the kernel says of an interface: a name of 16 bytes, then the answer."""
    return fcntl.ioctl(asking, request, struct.pack("256s", name.encode()[:15]))
