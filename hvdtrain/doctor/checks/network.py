"""Whether ranks on other hosts could be reached, and by what."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping

from hvdtrain.doctor.facts import Gathered
from hvdtrain.doctor.facts.network import Interface
from hvdtrain.doctor.finding import Finding, Level
from hvdtrain.runtime.environment import GLOO_LAUNCHER

_NAMING: Mapping[str, Level] = {
    "HOROVOD_GLOO_IFACE": "broken",
    "GLOO_SOCKET_IFNAME": "broken",
    "NCCL_SOCKET_IFNAME": "broken",
    "OMPI_MCA_btl_tcp_if_include": "warning",
    "OMPI_MCA_oob_tcp_if_include": "broken",
    "PRTE_MCA_prte_if_include": "broken",
    "HYDRA_IFACE": "broken",
    "I_MPI_HYDRA_IFACE": "broken",
}
"""Variables that name interfaces, and how bad it is when there is none of that name: one of Open MPI's is ignored."""


def host_name(facts: Gathered) -> Finding | None:
    """See that this host's name resolves, and to an address that others can use."""
    name, addresses = facts.network.name, facts.network.addresses
    if addresses is None:
        return None
    if not addresses:
        why = "horovodrun, srun and MPI ask for the address of this host's name, and fail or wait; Gloo crashes"
        mend = f"echo '{_own(facts) or '127.0.1.1'} {name}' | sudo tee -a /etc/hosts"
        level: Level = "broken" if facts.info.launcher == GLOO_LAUNCHER else "warning"
        return Finding("host_name", level, f"{name} does not resolve", why, mend)
    found = f"{name} is {', '.join(addresses)}"
    if not all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses):
        return Finding("host_name", "ok", found, minor=True)
    why = "other hosts that are told to connect to it connect to themselves"
    mend = f"in /etc/hosts let {name} stand behind {_own(facts) or 'an address that others reach'}, not behind 127.x"
    if facts.info.one_host:
        return Finding("host_name", "ok", found, f"of no matter on one host; with several, {why}: {mend}")
    return Finding("host_name", "warning", found, why, mend)


def interfaces(facts: Gathered) -> Finding:
    """List the interfaces by which other hosts may be reached, and say which one is the way out."""
    real = _real(facts)
    others = [one.name for one in facts.network.interfaces if one.virtual and one.up]
    text = ", ".join(f"{one.name} {one.address}{' (way out)' * (one.name == facts.network.route)}" for one in real)
    aside = f"; leading to containers of this host alone: {', '.join(others)}" if others else ""
    if not real:
        why = "there is no network but the loopback: ranks on other hosts cannot be reached"
        level: Level = "ok" if facts.info.one_host else "warning"
        return Finding("interfaces", level, f"none{aside}", why, "" if level == "ok" else "ip -brief address")
    if others and len(real) + len(others) > 1 and not facts.info.one_host and not _chosen(facts):
        aside_names = ",".join(["lo", *others])
        why = f"MPI and NCCL may try {', '.join(others)}, which no other host can reach: the start hangs"
        excluding = (f"OMPI_MCA_{part}_tcp_if_exclude={aside_names}" for part in ("btl", "oob"))
        mend = f"export {' '.join(excluding)} NCCL_SOCKET_IFNAME=^{aside_names}"
        return Finding("interfaces", "warning", f"{text}{aside}", why, mend)
    return Finding("interfaces", "ok", f"{text}{aside}")


def named_interfaces(facts: Gathered) -> Finding | None:
    """See that interfaces which somebody named are there."""
    wrong = [
        (variable, name)
        for variable, value in _named(facts)
        for name in _names(variable, value)
        if not _is_there(name, facts.network.interfaces, exact=variable != "NCCL_SOCKET_IFNAME")
    ]
    if not wrong:
        return None
    level: Level = "broken" if any(_NAMING[variable] == "broken" for variable, _ in wrong) else "warning"
    text = ", ".join(f"{variable} names {name}" for variable, name in wrong)
    why = "there is no such interface here: what was to use it fails at the start, or takes any other"
    there = ", ".join(one.name for one in _real(facts)) or "lo"
    variables = dict.fromkeys(variable for variable, _ in wrong)
    mend = f"name one that is here ({there}), or unset {' '.join(variables)}"
    return Finding("named_interfaces", level, text, why, mend)


def rdma(facts: Gathered) -> Finding | None:
    """See that InfiniBand and RoCE cards have a link, and that this process gets at them."""
    ports = facts.network.rdma
    if not ports:
        return None
    found = ", ".join(f"{p.device}:{p.port} {p.layer}, {'active' if p.active else 'down'}" for p in ports)
    if not facts.network.verbs:
        why = "there is no /dev/infiniband/uverbs*: programs cannot use these cards and talk by TCP"
        mend = "docker run --device /dev/infiniband --ulimit memlock=-1; a pod: the RDMA device plugin's resource"
        return Finding("rdma", "warning", found, why, mend)
    if not any(port.active for port in ports):
        return Finding("rdma", "warning", found, "no port has a link: all goes by TCP", "ibstat; ibv_devinfo")
    return Finding("rdma", "ok", found)


def ucx(facts: Gathered) -> Finding | None:
    """See that Open MPI can use such a card."""
    active = [port.device for port in facts.network.rdma if port.active]
    if facts.mpi.ucx is not False or not active:
        return None
    why = f"it talks by TCP, and {', '.join(dict.fromkeys(active))} could carry many times as much"
    mend = "load the site's module of an Open MPI with UCX (ompi_info shows pml: ucx), then: hvdtrain build-horovod"
    return Finding("ucx", "warning", "this Open MPI is built without UCX", why, mend)


def _real(facts: Gathered) -> list[Interface]:
    return [one for one in facts.network.interfaces if one.up and one.address and not (one.loopback or one.virtual)]


def _own(facts: Gathered) -> str:
    """The address of the way out, else any other one."""
    real = _real(facts)
    return next((one.address for one in real if one.name == facts.network.route), real[0].address if real else "")


def _named(facts: Gathered) -> Iterator[tuple[str, str]]:
    for variable in _NAMING:
        value = facts.environ.get(variable) or facts.mpi.site.get(variable, ("", None))[0]
        if value:
            yield variable, value


def _chosen(facts: Gathered) -> bool:
    excluded = any(name.endswith("_if_exclude") for name in (*facts.environ, *facts.mpi.site))
    return excluded or any(_named(facts))


def _names(variable: str, value: str) -> list[str]:
    """Names that have to be there: none where the value excludes."""
    if variable == "NCCL_SOCKET_IFNAME":
        return [] if value.startswith("^") else [part for part in value.split(",") if part]
    parts = [part.strip() for part in value.split(",")]
    return [part for part in parts if part and "/" not in part]  # Open MPI takes networks too: 10.0.0.0/16


def _is_there(name: str, interfaces: tuple[Interface, ...], *, exact: bool) -> bool:
    """Whether there is an interface of a name; NCCL takes a name for a beginning unless ``=`` stands before it."""
    there = [one.name for one in interfaces]
    if exact or name.startswith("="):
        return name.lstrip("=") in there
    return any(one.startswith(name) for one in there)
