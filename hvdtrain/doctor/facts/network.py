"""Facts about this host's network: name, interfaces, default route, RDMA cards. Linux."""

from __future__ import annotations

import ipaddress
import platform
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from hvdtrain.files import read_text_or_empty
from hvdtrain.programs import run_program
from hvdtrain.runtime.interfaces import is_virtual

_NAME_TIMEOUT_S = 5


@dataclass(frozen=True)
class Interface:
    """A network interface."""

    name: str
    address: str = ""  # its first IPv4 address; "" if it has none
    network: str = ""  # network of that address, such as ``10.0.0.0/24``; "" without an address
    mtu: int = 0  # largest packet in bytes
    mbit: int = 0  # speed of the hardware in Mbit/s; 0 for virtual interfaces, or if unknown
    up: bool = True  # whether it is switched on and has a link
    loopback: bool = False  # whether it leads to this host only
    virtual: bool = False  # whether it leads to containers and virtual machines of this host only


@dataclass(frozen=True)
class RdmaPort:
    """A port of an RDMA card. ``layer`` is InfiniBand or Ethernet (RoCE)."""

    device: str
    port: int
    active: bool
    layer: str


@dataclass(frozen=True)
class Network:
    """The network of this host."""

    name: str = "localhost"
    addresses: tuple[str, ...] | None = ()  # that the name resolves to; None if there is no program to resolve it
    interfaces: tuple[Interface, ...] = ()
    route: str = ""  # interface of the default route; "" if there is none
    rdma: tuple[RdmaPort, ...] = ()  # ports of InfiniBand and RoCE cards
    verbs: bool = True  # whether programs can use these cards

    @property
    def outward(self) -> list[Interface]:
        """The interfaces that lead to other hosts."""
        return [one for one in self.interfaces if one.up and one.address and not (one.loopback or one.virtual)]


def network(root: Path = Path("/")) -> Network:
    """Gather the facts, of the system below `root`. Packets are sent only to resolve this host's name."""
    name = platform.node()
    return Network(
        name=name,
        addresses=_addresses(name),
        interfaces=tuple(interfaces(root)),
        route=_default_route(read_text_or_empty(root / "proc/net/route")),
        rdma=tuple(_rdma_port(folder) for folder in sorted((root / "sys/class/infiniband").glob("*/ports/*"))),
        verbs=any((root / "dev/infiniband").glob("uverbs*")),
    )


def interfaces(root: Path = Path("/")) -> Iterator[Interface]:
    """Yield all network interfaces of this host."""
    addresses = psutil.net_if_addrs()
    for name, state in psutil.net_if_stats().items():
        folder = root / "sys/class/net" / name
        ipv4 = next((one for one in addresses.get(name, ()) if one.family == socket.AF_INET), None)
        yield Interface(
            name,
            address=ipv4.address if ipv4 else "",
            network=str(ipaddress.ip_network(f"{ipv4.address}/{ipv4.netmask}", strict=False)) if ipv4 else "",
            mtu=state.mtu,
            mbit=state.speed if (folder / "device").exists() else 0,  # virtual interfaces report a meaningless speed
            up=state.isup,
            loopback=ipaddress.ip_address(ipv4.address).is_loopback if ipv4 else name == "lo",
            virtual=is_virtual(name, root),
        )


def _addresses(name: str) -> tuple[str, ...] | None:
    """Resolve a name as other programs do. In a child process, because a dead name server blocks its caller."""
    getent = shutil.which("getent")
    if getent is None:
        return None
    try:
        text = run_program([getent, "ahosts", name], _NAME_TIMEOUT_S).out
    except OSError:
        return ()
    return tuple(dict.fromkeys(line.split()[0] for line in text.splitlines() if line.strip()))


def _default_route(table: str) -> str:
    """Return the interface of the default route with the lowest metric, from the kernel's table."""
    rows = [line.split() for line in table.splitlines()[1:]]
    defaults = [(int(row[6]), row[0]) for row in rows if len(row) > 7 and row[1] == row[7] == "00000000"]
    return min(defaults)[1] if defaults else ""


def _rdma_port(folder: Path) -> RdmaPort:
    state, layer = (read_text_or_empty(folder / name).strip() for name in ("state", "link_layer"))
    return RdmaPort(folder.parent.parent.name, int(folder.name), state.endswith("ACTIVE"), layer)
