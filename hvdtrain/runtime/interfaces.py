"""Find the network interface by which this host reaches another; what Gloo needs of names, ports and interfaces."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hvdtrain.errors import LaunchError
from hvdtrain.runtime.environment import change_variables, elastic, environ

_ANY_PORT = 9
_VIRTUAL = ("docker", "veth", "virbr", "cni", "flannel", "cali", "lxc")
_FABRIC = re.compile("(?:ib|hsn)[a-z]*[0-9]")  # names of interfaces of InfiniBand and Slingshot

_TORCH_INTERFACE = "GLOO_SOCKET_IFNAME"


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
    interface = interface_of(source_to(address)) if address else ""
    if interface and _TORCH_INTERFACE not in environ():
        change_variables({_TORCH_INTERFACE: interface})
