"""Find the network interface by which this host reaches another."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

_ANY_PORT = 9
_VIRTUAL = ("docker", "veth", "virbr", "cni", "flannel", "cali", "lxc")
_FABRIC = re.compile("(?:ib|hsn)[a-z]*[0-9]")
"""Names of interfaces of InfiniBand and Slingshot."""


def is_virtual(name: str, root: Path = Path("/")) -> bool:
    """Check whether an interface leads to containers and virtual machines of this host only."""
    folder = root / "sys/class/net" / name
    return any((folder / kind).exists() for kind in ("bridge", "tun_flags")) or name.startswith(_VIRTUAL)


def networks() -> dict[str, str]:
    """Return the interfaces that lead to other hosts, by their IPv4 network; those of a fast fabric first."""
    import psutil  # takes 30 ms

    up = [name for name, state in psutil.net_if_stats().items() if state.isup and not is_virtual(name)]
    found: dict[str, str] = {}
    for name in sorted(up, key=lambda name: _FABRIC.match(name) is None):
        for entry in psutil.net_if_addrs().get(name, ()):
            if entry.family == socket.AF_INET:
                network = ipaddress.ip_network(f"{entry.address}/{entry.netmask}", strict=False)
                if not network.is_loopback and not network.is_link_local:
                    found.setdefault(str(network), name)
    return found


def nccl_interfaces() -> str:
    """Return the value of NCCL_SOCKET_IFNAME for ranks of this host, "" where NCCL's own choice is right.

    NCCL itself knows ib* and docker*, but not hsn* or all bridges of containers:
    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname
    """
    import psutil  # takes 30 ms

    names = list(dict.fromkeys(networks().values()))
    fast = [name for name in names if _FABRIC.match(name)]
    if names and (fast or any(map(is_virtual, psutil.net_if_addrs()))):
        return f"={','.join(fast or names)}"
    return ""


def shared_fabric(hosts: Sequence[Mapping[str, str]]) -> str:
    """Return the first network to which all hosts have an interface of a fast fabric, "" without one.

    `hosts`: the answer of `networks` on each.
    """
    first, *others = hosts or [{}]
    fast = (network for network, name in first.items() if _FABRIC.match(name))
    return next((network for network in fast if all(_FABRIC.match(o.get(network, "")) for o in others)), "")


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
