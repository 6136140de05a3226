"""Checks of connections, routes and addresses of several hosts. Pure."""

from __future__ import annotations

import ipaddress

from hvdtrain.doctor.hosts.survey import Survey
from hvdtrain.doctor.report import Finding, by_value, names


def connections(survey: Survey) -> list[Finding]:
    """Check that each host can connect to all others."""
    faults: dict[str, list[tuple[str, str]]] = {}
    for source, attempts in survey.attempts.items():
        for target, attempt in attempts.items():
            if attempt.fault:
                faults.setdefault(attempt.fault, []).append((source, target))
    found = []
    for fault, pairs in faults.items():
        text = names(f"{source} to {target} ({survey.addresses[target]})" for source, target in pairs)
        found.append(Finding("connections", "broken", text, *_explain_fault(survey, fault, *pairs[0])))
    if not found and any(survey.attempts.values()):
        count = sum(map(len, survey.attempts.values()))
        found.append(Finding("connections", "ok", f"each host reaches all others ({count} connections) on any port"))
    return found


def _explain_fault(survey: Survey, fault: str, source: str, target: str) -> tuple[str, str]:
    """Return the explanation and the fix of a failed connection."""
    address, cidr = survey.addresses[target], _network(survey, source)
    route = f"on {source}: ip route get {address}"
    return {
        "timeout": (
            "no answer: a firewall drops connections, or there is no route back; mpirun and Gloo would hang",
            _open_ports(f"on {target}: firewall-cmd --zone=trusted --add-source={cidr}, or ufw allow from {cidr}"),
        ),
        "refused": (
            "the connection is refused although the other host listens: by a firewall, or a host with the same address",
            _open_ports(f"on {target}: nft list ruleset, or iptables -L; ufw allow from {cidr}"),
        ),
        "route": (f"{source} has no route to {address}", route),
        "stranger": (
            f"another program answers {source} at {address}: {target} is not the only host with this address",
            f"{route}; name hosts with different addresses in --hosts",
        ),
    }.get(fault, (f"error of the system: {fault}", route))


def _open_ports(example: str) -> str:
    return (
        f"allow all TCP between the job's hosts, because ranks listen on ports that the system picks ({example}); or "
        "restrict ranks to open ports: Gloo by sysctl net.ipv4.ip_local_port_range='46000 47999', Open MPI 4 by --mca "
        "btl_tcp_port_min_v4 46000 --mca btl_tcp_port_range_v4 1000 --mca oob_tcp_dynamic_ipv4_ports 47000-47999"
    )


def routes(survey: Survey) -> list[Finding]:
    """Report the interface to the other hosts, and compare packet sizes."""
    used, sizes = {}, {}
    for host, attempts in survey.attempts.items():
        if attempts:
            used[host] = " and ".join(dict.fromkeys(one.interface or "no interface" for one in attempts.values()))
            sizes[host] = " and ".join(dict.fromkeys(str(one.mtu) for one in attempts.values()))
    if not used:
        return []
    interface = Finding("interface", "ok", by_value(used), _by_network(survey, used))
    if len(set(sizes.values())) == 1:
        return [interface, Finding("mtu", "ok", by_value(sizes), minor=True)]
    why = "larger packets may be lost without an error: small messages pass, large ones hang"
    fix = "ip link set dev IF mtu 1500 on all hosts, or 9000 on all hosts and switches"
    return [interface, Finding("mtu", "warning", by_value(sizes), why, fix)]


def _by_network(survey: Survey, used: dict[str, str]) -> str:
    if len(set(used.values())) == 1:
        return ""
    networks = {_network(survey, host) for host in used}
    if len(networks) > 1:
        return "the names differ: options that name one interface for all hosts cannot be used"
    return f"the names differ: name the network instead, as in --mca btl_tcp_if_include {networks.pop()}"


def shared_addresses(survey: Survey) -> list[Finding]:
    """Warn of addresses that several hosts have, such as container bridges: MPI tries them and reaches itself."""
    where: dict[str, dict[str, str]] = {}
    for host, facts in survey.facts.items():
        for interface in facts.interfaces:
            where.setdefault(interface.address, {})[host] = interface.name
    found = []
    for address, hosts in where.items():
        distinct = {(survey.facts[host].name, survey.addresses.get(host)) for host in hosts}
        if len(distinct) > 1:
            why = "Open MPI tries every network that two hosts seem to share, and waits forever on this one"
            network = {_network(survey, host) for host in hosts}
            fix = f"--mca btl_tcp_if_include {min(network)} --mca oob_tcp_if_include {min(network)}"
            text = f"{address} is {by_value(hosts)}, on each of {names(hosts)}"
            found.append(Finding("address", "warning", text, why, fix))
    return found


def _network(survey: Survey, host: str) -> str:
    if interface := survey.interface(host):
        return interface.network
    return str(ipaddress.ip_network(survey.addresses[host].partition("%")[0]))
