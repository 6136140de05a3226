"""The network as this host has it: its name, interfaces, the way out, cards that MPI may use without TCP. Linux."""

from __future__ import annotations

import fcntl
import ipaddress
import platform
import shutil
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.programs import run_program

_SIOCGIFFLAGS, _SIOCGIFADDR = 0x8913, 0x8915
_UP, _LOOPBACK, _RUNNING = 0x1, 0x8, 0x40
_NAME_TIMEOUT_S = 5


@dataclass(frozen=True)
class Interface:
    """A network interface.

    Attributes:
        name: such as eth0.
        address: of IP version 4; "" where it has none.
        up: whether it is switched on and has a link.
        loopback: whether it leads to this host alone.
        virtual: whether it leads to containers and virtual machines of this host alone.
    """

    name: str
    address: str = ""
    up: bool = True
    loopback: bool = False
    virtual: bool = False


@dataclass(frozen=True)
class RdmaPort:
    """A port of a card that reaches memory of other hosts: ``layer`` is InfiniBand or Ethernet (RoCE)."""

    device: str
    port: int
    active: bool
    layer: str


@dataclass(frozen=True)
class Network:
    """The network of this host.

    Attributes:
        name: of this host.
        addresses: what the name resolves to; none where it does not, None where nobody could be asked.
        interfaces: all that there are.
        route: the interface by which packets to unknown places leave, "" where there is none.
        rdma: ports of InfiniBand and the like.
        verbs: whether programs get at these cards.
    """

    name: str = "localhost"
    addresses: tuple[str, ...] | None = ()
    interfaces: tuple[Interface, ...] = ()
    route: str = ""
    rdma: tuple[RdmaPort, ...] = ()
    verbs: bool = True


def network(root: Path = Path("/")) -> Network:
    """Look at the network; nothing is sent but the question for the address of this host's name.

    Args:
        root: the file system whose ``sys``, ``proc`` and ``dev`` are asked.
    """
    name = platform.node()
    return Network(
        name=name,
        addresses=_addresses(name),
        interfaces=tuple(_interface(each, root / "sys/class/net" / each) for _, each in socket.if_nameindex()),
        route=_route(_text(root / "proc/net/route")),
        rdma=tuple(_rdma(folder) for folder in sorted((root / "sys/class/infiniband").glob("*/ports/*"))),
        verbs=any((root / "dev/infiniband").glob("uverbs*")),
    )


def _addresses(name: str) -> tuple[str, ...] | None:
    """Ask as programs do. A name server that does not answer holds a process of its own, for a while."""
    getent = shutil.which("getent")
    if getent is None:
        return None
    try:
        found = run_program([getent, "ahosts", name], _NAME_TIMEOUT_S).out
    except OSError:
        return ()
    return tuple(dict.fromkeys(line.split()[0] for line in found.splitlines() if line.strip()))


def _interface(name: str, folder: Path) -> Interface:
    """Ask the kernel; ``folder`` may be another network's, and then tells nothing of this name."""
    answer = _ask(name, _SIOCGIFFLAGS)
    flags = struct.unpack_from("<H", answer)[0] if answer else 0
    address = _ask(name, _SIOCGIFADDR)
    kin = [(folder / kind).exists() for kind in ("bridge", "tun_flags")]
    return Interface(
        name,
        address=str(ipaddress.ip_address(address[4:8])) if address else "",
        up=bool(flags & _UP and flags & _RUNNING),
        loopback=bool(flags & _LOOPBACK),
        virtual=any(kin) or name.startswith(("docker", "veth", "virbr", "cni", "flannel", "cali", "lxc")),
    )


def _ask(name: str, what: int) -> bytes:
    """Ask for something of an interface: what stands behind its name in the kernel's answer, empty without one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            return fcntl.ioctl(asking, what, struct.pack("256s", name.encode()[:15]))[16:]
        except OSError:
            return b""


def _route(table: str) -> str:
    """Read the kernel's table of routes: the interface of the one that fits all addresses, with the lowest metric."""
    rows = [line.split() for line in table.splitlines()[1:]]
    found = [(int(row[6]), row[0]) for row in rows if len(row) > 7 and row[1] == row[7] == "00000000"]
    return min(found)[1] if found else ""


def _rdma(folder: Path) -> RdmaPort:
    state = _text(folder / "state").strip()
    return RdmaPort(
        folder.parent.parent.name, int(folder.name), state.endswith("ACTIVE"), _text(folder / "link_layer").strip()
    )


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
