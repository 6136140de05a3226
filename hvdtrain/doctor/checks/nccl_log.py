"""What a log that NCCL wrote under ``NCCL_DEBUG=INFO`` tells: each check is of no use without one."""

from __future__ import annotations

import re

from hvdtrain.doctor.facts import Gathered
from hvdtrain.doctor.finding import Finding

_WRITE_ONE = "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,ENV,NET,GRAPH mpirun ... 2> nccl.log"
_SHOWN = 3

_CURES = (
    (r"shared memory segment|No space left on device|shm_open", "make /dev/shm larger: docker run --shm-size=8g"),
    (
        r"Connection refused|No route to host|[Tt]imed out|No socket interface",
        "NCCL_SOCKET_IFNAME=NAME of the interface by which the hosts reach each other (hvdtrain doctor lists them)",
    ),
    (r"ibv_reg_mr|Cannot allocate memory|RLIMIT_MEMLOCK", "ulimit -l unlimited on each host, for the daemons too"),
    (r"Duplicate GPU", "start as many ranks on a host as it has GPUs"),
    (r"out of memory", "a smaller --train.micro_batch, or end what else is on the GPU (nvidia-smi)"),
    (r"truncated|[Mm]ismatch", "the same torch and Horovod on each host: hvdtrain doctor on each of them"),
    (
        r"error 12|error 5\b|Got completion",
        "see that the card's ports are active and on one fabric (ibstat); NCCL_IB_GID_INDEX=3 where it is RoCE",
    ),
    (r"driver", "a newer driver (nvidia-smi shows which there is)"),
)


def nccl_log(facts: Gathered) -> Finding | None:
    """See that the log is one, and how far it goes."""
    log = facts.nccl_log
    if log is None:
        return None
    if not (log.versions or log.hosts or log.warnings):
        return Finding("nccl_log", "warning", log.name, "no line in it is NCCL's", f"write one: {_WRITE_ONE}")
    size = f", {log.ranks} ranks" if log.ranks else ""
    return Finding("nccl_log", "ok", f"{log.name}: NCCL {', '.join(log.versions) or '?'}{size}")


def nccl_one_version(facts: Gathered) -> Finding | None:
    """See that all ranks have one NCCL."""
    log = facts.nccl_log
    if log is None or len(log.versions) < 2:
        return None
    why = "ranks with different versions do not understand each other: they hang or end at the first exchange"
    mend = "install the same torch on all hosts, look at LD_LIBRARY_PATH and LD_PRELOAD, then: hvdtrain build-horovod"
    return Finding("nccl_version", "broken", ", ".join(log.versions), why, mend)


def nccl_network(facts: Gathered) -> Finding | None:
    """See by which network the hosts talk."""
    log = facts.nccl_log
    if log is None or not (log.between_hosts or any(kind.startswith("NET/") for kind in log.channels)):
        return None
    kinds = {kind: number for kind, number in log.channels.items() if kind.startswith("NET/")}
    found = ", ".join(f"{number} connections by {kind}" for kind, number in kinds.items()) or "no connection told"
    found += f", TCP on {', '.join(log.interfaces)}" if log.interfaces else ""
    local = [name for name in log.interfaces if name == "lo" or name.startswith(("docker", "veth", "virbr"))]
    if local and log.between_hosts:
        why = f"{', '.join(local)} leads to no other host"
        return Finding("nccl_network", "broken", found, why, "NCCL_SOCKET_IFNAME=^lo,docker,veth,virbr")
    if "NET/Socket" not in kinds:
        return Finding("nccl_network", "ok", found)
    if log.settings.get("NCCL_IB_DISABLE", "0") != "0":
        why = "gradients go by TCP and the CPU, because NCCL_IB_DISABLE is set"
        return Finding("nccl_network", "warning", found, why, "unset NCCL_IB_DISABLE")
    why = "gradients go by TCP and the CPU: NCCL " + ("found no InfiniBand" if log.no_ib else "chose no InfiniBand")
    mend = "where there is a card: ls /dev/infiniband in this container, apt-get install libibverbs1 ibverbs-providers"
    return Finding("nccl_network", "warning", found, why, mend)


def nccl_direct(facts: Gathered) -> Finding | None:
    """See whether network cards reach GPU memory themselves."""
    log = facts.nccl_log
    if log is None:
        return None
    network = sum(number for kind, number in log.channels.items() if kind.startswith("NET/") and kind != "NET/Socket")
    if not network:
        return None
    found = f"{log.direct} of {network} connections by GPUDirect RDMA"
    if log.direct == network:
        return Finding("nccl_gpudirect", "ok", found)
    why = "the others copy each gradient by the host's memory"
    mend = "sudo modprobe nvidia_peermem; NCCL_NET_GDR_LEVEL=SYS if the card is far from the GPU (nvidia-smi topo -m)"
    return Finding("nccl_gpudirect", "warning", found, why, mend)


def nccl_peers(facts: Gathered) -> Finding | None:
    """See whether GPUs of one host reach each other without the host's memory."""
    log = facts.nccl_log
    if log is None or not (log.p2p_off or log.channels.get("SHM")):
        return None
    found = f"{log.channels.get('SHM', 0)} connections by shared memory, {log.channels.get('P2P', 0)} from GPU to GPU"
    if log.settings.get("NCCL_P2P_DISABLE", "0") != "0":
        why = "GPUs of one host exchange by its memory, because NCCL_P2P_DISABLE is set"
        return Finding("nccl_peers", "warning", found, why, "unset NCCL_P2P_DISABLE")
    why = "GPUs of one host exchange by its memory; " + (
        "NCCL says that they have a link and may not use it" if log.p2p_off else "they have no link that it would use"
    )
    mend = "nvidia-smi topo -p2p r; switch PCI access control (ACS) off, in a virtual machine see its host's settings"
    return Finding("nccl_peers", "warning", found, why, mend)


def nccl_warnings(facts: Gathered) -> Finding | None:
    """Repeat what NCCL warned of, with the cures that are known."""
    log = facts.nccl_log
    if log is None or not log.warnings:
        return None
    more = f" (and {len(log.warnings) - _SHOWN} more)" if len(log.warnings) > _SHOWN else ""
    cures = [cure for pattern, cure in _CURES if any(re.search(pattern, text) for text in log.warnings)]
    mend = "; ".join(cures) or "the lines before the first warning in that log tell what it was doing"
    why = "NCCL warns of what makes an exchange fail"
    return Finding("nccl_warnings", "broken", "; ".join(log.warnings[:_SHOWN]) + more, why, mend)
