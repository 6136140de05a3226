"""Checks of the network between hosts, and of variables that slow training down: they override those of hvdtrain."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping

from hvdtrain.doctor.facts import DoctorFacts
from hvdtrain.doctor.report import Finding, Level, known
from hvdtrain.runtime.environment import GLOO_LAUNCHER

_INTERFACE_VARIABLES: Mapping[str, Level] = {
    "HOROVOD_GLOO_IFACE": "broken",
    "GLOO_SOCKET_IFNAME": "broken",
    "NCCL_SOCKET_IFNAME": "broken",
    "OMPI_MCA_btl_tcp_if_include": "warning",
    "OMPI_MCA_oob_tcp_if_include": "broken",
    "PRTE_MCA_prte_if_include": "broken",
    "HYDRA_IFACE": "broken",
    "I_MPI_HYDRA_IFACE": "broken",
}
"""Variables that name interfaces, and the level if the interface is missing. Open MPI ignores one of them."""

_OFF = ("", "0", "false", "off", "no")


def host_name(facts: DoctorFacts) -> Finding | None:
    """Check that this host's name resolves to an address that other hosts can use."""
    name, addresses = facts.network.name, facts.network.addresses
    if addresses is None:
        return None
    if not addresses:
        why = "horovodrun, srun and MPI look up this name: they fail or wait, and Gloo crashes"
        fix = f"echo '{_own(facts) or '127.0.1.1'} {name}' | sudo tee -a /etc/hosts"
        level: Level = "broken" if facts.info.launcher == GLOO_LAUNCHER else "warning"
        return Finding("host_name", level, f"{name} does not resolve", why, fix)
    found = f"{name} is {', '.join(addresses)}"
    if not all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses):
        return Finding("host_name", "ok", found, minor=True)
    why = "other hosts that connect to this address reach themselves"
    fix = f"in /etc/hosts, map {name} to {_own(facts) or 'an address that other hosts reach'} instead of 127.x"
    if facts.info.one_host:
        return Finding("host_name", "ok", found, f"harmless on one host; in a job of several hosts {why}: {fix}")
    return Finding("host_name", "warning", found, why, fix)


def interfaces(facts: DoctorFacts) -> Finding:
    """List the interfaces to other hosts and mark that of the default route."""
    route, outward = facts.network.route, facts.network.outward
    real = [f"{one.name} {one.address}{' (default route)' * (one.name == route)}" for one in outward]
    others = [one.name for one in facts.network.interfaces if one.virtual and one.up]
    found = ", ".join(real) or "none"
    if others:
        found += f"; for containers of this host only: {', '.join(others)}"
    if not real:
        why = "there is no network except the loopback: other hosts cannot be reached"
        level: Level = "ok" if facts.info.one_host else "warning"
        return Finding("interfaces", level, found, why, "" if level == "ok" else "ip -brief address")
    is_excluded = any(name.endswith("_if_exclude") for name in (*facts.environ, *facts.mpi.site))
    if not others or facts.info.one_host or is_excluded or any(_named(facts)):
        return Finding("interfaces", "ok", found)
    excluded = ",".join(["lo", *others])
    why = f"MPI and NCCL may try {', '.join(others)}, which leads to no other host: the job hangs at start"
    excluding = (f"OMPI_MCA_{part}_tcp_if_exclude={excluded}" for part in ("btl", "oob"))
    fix = f"export {' '.join(excluding)} NCCL_SOCKET_IFNAME=^{excluded}"
    return Finding("interfaces", "warning", found, why, fix)


def named_interfaces(facts: DoctorFacts) -> Finding | None:
    """Check that the interfaces named by variables exist."""
    existing = [one.name for one in facts.network.interfaces]
    wrong = [(variable, name) for variable, value in _named(facts) for name in _missing(variable, value, existing)]
    if not wrong:
        return None
    level: Level = "broken" if any(_INTERFACE_VARIABLES[variable] == "broken" for variable, _ in wrong) else "warning"
    found = ", ".join(f"{variable} names {name}" for variable, name in wrong)
    why = "this host has no such interface: the job fails at start, or uses another one"
    useful = ", ".join(one.name for one in facts.network.outward) or "lo"
    fix = f"name one that exists ({useful}), or unset {' '.join(dict(wrong))}"
    return Finding("named_interfaces", level, found, why, fix)


def rdma(facts: DoctorFacts) -> Finding | None:
    """Check that InfiniBand and RoCE cards have a link and that this process may use them."""
    ports = facts.network.rdma
    if not ports:
        return None
    found = ", ".join(f"{p.device}:{p.port} {p.layer}, {'active' if p.active else 'down'}" for p in ports)
    if not facts.network.verbs:
        why = "/dev/infiniband/uverbs* is missing: programs cannot use these cards and use TCP"
        fix = "docker run --device /dev/infiniband --ulimit memlock=-1; in a pod: the RDMA device plugin's resource"
        return Finding("rdma", "warning", found, why, fix)
    if any(port.active for port in ports):
        return Finding("rdma", "ok", found)
    why = "no port has a link: everything is sent over TCP"
    return Finding("rdma", "warning", found, why, "check cables and ports with ibstat and ibv_devinfo")


def ucx(facts: DoctorFacts) -> Finding | None:
    """Check that Open MPI can use the InfiniBand or RoCE card."""
    active = [port.device for port in facts.network.rdma if port.active]
    if facts.mpi.ucx is not False or not active:
        return None
    why = f"it uses TCP, although {', '.join(dict.fromkeys(active))} is many times as fast"
    fix = "load a module of Open MPI with UCX (ompi_info shows pml: ucx), then: hvdtrain build-horovod"
    return Finding("ucx", "warning", "this Open MPI is built without UCX", why, fix)


def _own(facts: DoctorFacts) -> str:
    """Return the address of the default route's interface, else any other address."""
    real = facts.network.outward
    return next((one.address for one in real if one.name == facts.network.route), real[0].address if real else "")


def _named(facts: DoctorFacts) -> Iterator[tuple[str, str]]:
    for variable in _INTERFACE_VARIABLES:
        value = facts.environ.get(variable) or facts.mpi.site.get(variable, ("", None))[0]
        if value:
            yield variable, value


def _missing(variable: str, value: str, existing: list[str]) -> list[str]:
    """Return the named interfaces that do not exist. Open MPI also accepts networks: 10.0.0.0/16.

    NCCL treats a name as a prefix unless it starts with ``=``. Its list excludes interfaces if it starts with ``^``.
    """
    if variable != "NCCL_SOCKET_IFNAME":
        names = [part.strip() for part in value.split(",")]
        return [name for name in names if name and "/" not in name and name.lstrip("=") not in existing]
    names = [] if value.startswith("^") else [part for part in value.split(",") if part]
    return [n for n in names if n.lstrip("=") not in existing and not any(one.startswith(n) for one in existing)]


def leftovers(facts: DoctorFacts) -> Finding | None:
    """Warn of variables that slow training down or fill the disk."""
    gpus = bool(facts.installation.torch.values.get("gpus"))
    bad = {}
    for row in known("variables"):
        word = facts.environ.get(row["name"], "").strip().lower()
        is_bad = word in row["harmful"] if "harmful" in row else word not in row.get("harmless", _OFF)
        if row["name"] in facts.environ and is_bad and (gpus or not row.get("only_gpu")):
            bad[row["name"]] = row["why"]
    text = ", ".join(f"{name}={facts.environ[name]}" for name in bad)
    why = "; ".join(f"{name}: {reason}" for name, reason in bad.items())
    return Finding("variables", "warning", text, why, f"unset {' '.join(bad)}") if bad else None


def shared_memory_off(facts: DoctorFacts) -> Finding | None:
    """Check that Open MPI may use shared memory between ranks of a host."""
    value = facts.environ.get("OMPI_MCA_btl") or facts.mpi.site.get("OMPI_MCA_btl", ("", None))[0]
    library = facts.mpi.library
    if not value or library is None or library.family != "openmpi":
        return None
    shared = any(name in ("vader", "sm") for name in value.lstrip("^").split(","))
    if shared != value.startswith("^"):
        return None
    why = "ranks on one host communicate over TCP instead of shared memory"
    return Finding("btl", "warning", f"OMPI_MCA_btl={value}", why, "set OMPI_MCA_btl=^openib, or unset it")
