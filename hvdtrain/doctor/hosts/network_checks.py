"""Clocks, ways between hosts, and networks that only look like one. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable

from hvdtrain.doctor.finding import Finding
from hvdtrain.doctor.hosts.clock_offset import furthest
from hvdtrain.doctor.hosts.host_text import by_value, names
from hvdtrain.doctor.hosts.survey import Survey

_CLOCK_S = 1.0
"""What file times and log lines of two hosts may differ, and still be put in order by hand."""
_REFUSED_S = 300.0
"""What munge (Slurm) and Kerberos allow."""

_OPEN = (
    "ranks listen on ports that the system picks: let all TCP of the job's hosts through to each other ({example}); or "
    "hold them to ports that are open: Gloo by sysctl net.ipv4.ip_local_port_range='46000 47999', Open MPI 4 by "
    "--mca btl_tcp_port_min_v4 46000 --mca btl_tcp_port_range_v4 1000 --mca oob_tcp_dynamic_ipv4_ports 47000-47999"
)


def clocks(survey: Survey) -> list[Finding]:
    """See that clocks agree as far as it matters; runs themselves align their timelines by messages."""
    if len(survey.offsets) < 2:
        return []
    behind, ahead, off = furthest(survey.offsets)
    told = f"{ahead} is {_seconds(off.ahead_s)} ahead of {behind} (give or take {_seconds(off.error_s)})"
    if off.ahead_s - off.error_s <= _CLOCK_S:
        return [Finding("clocks", "ok", told)]
    why = "times of files and of log lines of these hosts do not follow one another"
    if off.ahead_s - off.error_s > _REFUSED_S:
        why += "; Slurm's munge and Kerberos refuse each other beyond 5 minutes, TLS finds certificates not yet valid"
    return [Finding("clocks", "warning", told, why, "on both: timedatectl set-ntp true (chronyc tracking shows it)")]


def ways(survey: Survey) -> list[Finding]:
    """See that each host gets a connection to each other."""
    faults: dict[str, list[tuple[str, str]]] = {}
    for source, there in survey.tried.items():
        for target, tried in there.items():
            if tried.fault:
                faults.setdefault(tried.fault, []).append((source, target))
    found = []
    for fault, pairs in faults.items():
        told = names(f"{source} to {target} ({survey.addresses[target]})" for source, target in pairs)
        why, mend = _FAULTS.get(fault, _other)(survey, *pairs[0])
        found.append(Finding("connections", "broken", told, f"{why}: {fault}" if fault not in _FAULTS else why, mend))
    if not found and any(survey.tried.values()):
        count = sum(map(len, survey.tried.values()))
        found.append(Finding("connections", "ok", f"each host reaches each other, {count} way(s), on any port"))
    return found


def _dropped(survey: Survey, source: str, target: str) -> tuple[str, str]:
    cidr = _network(survey, source)
    example = f"on {target}: firewall-cmd --zone=trusted --add-source={cidr}, or ufw allow from {cidr}"
    why = "connections are not answered: a firewall drops them, or no route leads back; mpirun and Gloo would hang"
    return why, _OPEN.format(example=example)


def _refused(survey: Survey, source: str, target: str) -> tuple[str, str]:
    cidr = _network(survey, source)
    example = f"on {target}: nft list ruleset, or iptables -L; ufw allow from {cidr}"
    return "something refuses what the other host listens for: a firewall, or a host of the same address", _OPEN.format(
        example=example
    )


def _no_route(survey: Survey, source: str, target: str) -> tuple[str, str]:
    address = survey.addresses[target]
    return f"no route leads from {source} to {address}", f"on {source}: ip route get {address}"


def _stranger(survey: Survey, source: str, target: str) -> tuple[str, str]:
    address = survey.addresses[target]
    why = f"something else answers at {address} when {source} asks: the address is not {target}'s alone"
    return why, f"on {source}: ip route get {address}; give each host an address of its own in --hosts"


def _other(survey: Survey, source: str, target: str) -> tuple[str, str]:
    return "the system says", f"on {source}: ip route get {survey.addresses[target]}"


_FAULTS: dict[str, Callable[[Survey, str, str], tuple[str, str]]] = {
    "timeout": _dropped,
    "refused": _refused,
    "route": _no_route,
    "stranger": _stranger,
}


def routes(survey: Survey) -> list[Finding]:
    """Name the interface by which each host goes to the others, and compare how large packets may be."""
    used, sizes = {}, {}
    for host, there in survey.tried.items():
        if there:
            used[host] = " and ".join(dict.fromkeys(tried.interface or "no interface" for tried in there.values()))
            sizes[host] = " and ".join(dict.fromkeys(str(tried.mtu) for tried in there.values()))
    if not used:
        return []
    found = [Finding("interface", "ok", by_value(used), _by_network(survey, used))]
    if len(set(sizes.values())) > 1:
        why = "packets of the larger size are lost on the way where no router tells: small messages pass, large hang"
        mend = "ip link set dev IF mtu 1500 on all, or 9000 on all hosts and switches"
        found.append(Finding("mtu", "warning", by_value(sizes), why, mend))
    else:
        found.append(Finding("mtu", "ok", by_value(sizes), minor=True))
    return found


def _by_network(survey: Survey, used: dict[str, str]) -> str:
    if len(set(used.values())) == 1:
        return ""
    networks = {_network(survey, host) for host in used}
    if len(networks) > 1:
        return "names differ: where an option wants one interface for all, none will do"
    return f"names differ: Open MPI takes the network for them, --mca btl_tcp_if_include {networks.pop()}"


def impostors(survey: Survey) -> list[Finding]:
    """Notice addresses that several hosts have, as bridges of containers do: MPI tries them, and meets itself."""
    where: dict[str, dict[str, str]] = {}
    for host, said in survey.says.items():
        for interface in said.interfaces:
            where.setdefault(interface.address, {})[host] = interface.name
    found = []
    for address, hosts in where.items():
        distinct = {(survey.says[host].name, survey.addresses.get(host)) for host in hosts}
        if len(distinct) > 1:
            why = "Open MPI tries every network that looks common to two hosts, and waits on this one for ever"
            network = {_network(survey, host) for host in hosts}
            mend = f"--mca btl_tcp_if_include {min(network)} --mca oob_tcp_if_include {min(network)}"
            told = f"{address} is {by_value(hosts)}, on each of {names(hosts)}"
            found.append(Finding("address", "warning", told, why, mend))
    return found


def _network(survey: Survey, host: str) -> str:
    """The network that a host's address is in."""
    address = survey.addresses[host]
    for interface in survey.says[host].interfaces:
        if interface.address == address:
            return interface.network
    return str(ipaddress.ip_network(address.partition("%")[0]))


def _seconds(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:,.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"
