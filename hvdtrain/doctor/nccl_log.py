"""Read and check a log that NCCL wrote with ``NCCL_DEBUG=INFO``: how GPUs are connected, and warnings. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable

from hvdtrain.doctor.finding import Finding
from hvdtrain.timeline.nccl import NcclLines

_NAME = re.compile(r"(?:\[\d+\])?([A-Za-z][\w.-]*):[\d.a-fA-F:]+<")
_CARD = re.compile(r"\[\d+\]([\w.-]+):\d+/(?:IB|RoCE|uverbs)")
_CHANNEL = re.compile(r"(P2P|SHM)\b|NET/([^/]+)")

_WRITE_ONE = "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,ENV,NET,GRAPH mpirun ... 2> nccl.log"
_SHOWN = 3

_FIXES = (
    (r"shared memory segment|No space left on device|shm_open", "make /dev/shm larger: docker run --shm-size=8g"),
    (
        r"Connection refused|No route to host|[Tt]imed out|No socket interface",
        "set NCCL_SOCKET_IFNAME to the interface between the hosts (hvdtrain doctor lists the interfaces)",
    ),
    (
        r"ibv_reg_mr|Cannot allocate memory|RLIMIT_MEMLOCK",
        "ulimit -l unlimited on each host, also for daemons that start ranks",
    ),
    (r"Duplicate GPU", "start one rank per GPU: no more ranks on a host than it has GPUs"),
    (r"out of memory", "use a smaller --train.micro_batch, or end other programs on the GPU (nvidia-smi)"),
    (r"truncated|[Mm]ismatch", "install the same torch and Horovod on all hosts; run hvdtrain doctor on each"),
    (
        r"error 12|error 5\b|Got completion",
        "check that the card's ports are active and on one fabric (ibstat); for RoCE set NCCL_IB_GID_INDEX=3",
    ),
    (r"driver", "install a newer driver (nvidia-smi shows the current one)"),
)


class NcclLog(NcclLines):
    """The content of a log. `name`: of the file."""

    def __init__(self, lines: Iterable[str] = (), name: str = "NCCL's log") -> None:
        super().__init__()
        self.name = name
        for line in lines:
            self.add_line(line)

    @property
    def versions(self) -> list[str]:
        """All versions of NCCL."""
        return list(dict.fromkeys(version.partition("+")[0] for (version,) in self.facts["version"]))

    @property
    def size(self) -> tuple[int, int]:
        """Ranks and nodes of the largest communicator; 0 for an unknown number."""
        return max(((int(ranks), int(nodes or 0)) for ranks, nodes in self.facts["size"]), default=(0, 0))

    @property
    def between_hosts(self) -> bool:
        """Whether the job had several hosts."""
        return max(self.size[1], len(self.hosts)) > 1

    def channels(self, text: str = "") -> Counter[str]:
        """Return the number of connections by kind, such as P2P, SHM, NET/IB; of those with a text in their way."""
        found: Counter[str] = Counter()
        for (_, _, via), gpus in self.facts["link"].items():
            if (kind := _CHANNEL.match(via)) and text in via:
                found[kind[1] or f"NET/{kind[2].strip()}"] += sum(gpus.values())
        return found

    @property
    def interfaces(self) -> list[str]:
        """Interfaces that NCCL uses for TCP."""
        texts = [values[-1] for kind in ("bootstrap", "device") for values in self.facts[kind]]
        return list(dict.fromkeys(name for text in texts for name in _NAME.findall(text)))

    def is_set(self, variable: str) -> bool:
        """Return whether a variable of NCCL was set to other than 0."""
        return any(value != "0" for name, value in self.facts["setting"] if name == variable)


def fabric(log: NcclLog, cards: Iterable[str] = ()) -> str:
    """Describe what NCCL uses, such as ``NET/IB mlx5_0``; "" if the log does not show it. `cards`: of this host."""
    kinds = [kind for kind in log.channels() if kind.startswith("NET/")]
    names = dict.fromkeys(card for _, text in log.facts["device"] for card in _CARD.findall(text))
    used = {"NET/IB": list(names), "NET/Socket": log.interfaces}
    text = ", ".join(" ".join([kind, *used.get(kind, ())]) for kind in kinds or log.channels())
    unused = ", ".join(cards)
    return f"{text} (although there are {unused})" if "NET/Socket" in kinds and unused else text


def nccl_log(log: NcclLog) -> Finding:
    """Check that the file is a log of NCCL, and summarize it."""
    if not (log.versions or log.hosts or log.warnings):
        return Finding("nccl_log", "warning", log.name, "it has no line from NCCL", f"write one: {_WRITE_ONE}")
    size = f", {log.size[0]} ranks" if log.size[0] else ""
    return Finding("nccl_log", "ok", f"{log.name}: NCCL {', '.join(log.versions) or '?'}{size}")


def nccl_one_version(log: NcclLog) -> Finding | None:
    """Check that all ranks have the same NCCL."""
    if len(log.versions) < 2:
        return None
    why = "ranks with different versions are incompatible: they hang or fail at the first exchange"
    fix = "install the same torch on all hosts, check LD_LIBRARY_PATH and LD_PRELOAD, then: hvdtrain build-horovod"
    return Finding("nccl_version", "broken", ", ".join(log.versions), why, fix)


def nccl_network(log: NcclLog) -> Finding | None:
    """Check that hosts communicate over InfiniBand or RoCE, or at least over the right interface."""
    kinds = {kind: number for kind, number in log.channels().items() if kind.startswith("NET/")}
    if not (log.between_hosts or kinds):
        return None
    found = ", ".join(f"{number} connections over {kind}" for kind, number in kinds.items()) or "no connection logged"
    found += f", TCP on {', '.join(log.interfaces)}" if log.interfaces else ""
    local = [name for name in log.interfaces if name == "lo" or name.startswith(("docker", "veth", "virbr"))]
    if local and log.between_hosts:
        why = f"{', '.join(local)} leads to no other host"
        return Finding("nccl_network", "broken", found, why, "NCCL_SOCKET_IFNAME=^lo,docker,veth,virbr")
    if "NET/Socket" not in kinds:
        return Finding("nccl_network", "ok", found)
    if log.is_set("NCCL_IB_DISABLE"):
        why = "gradients are sent over TCP by the CPU, because NCCL_IB_DISABLE is set"
        return Finding("nccl_network", "warning", found, why, "unset NCCL_IB_DISABLE")
    no_card = ("IB", "No device found.") in log.facts["device"]
    why = f"gradients are sent over TCP by the CPU: NCCL {'found' if no_card else 'chose'} no InfiniBand"
    fix = "if there is a card, check /dev/infiniband in the container and apt-get install libibverbs1 ibverbs-providers"
    return Finding("nccl_network", "warning", found, why, fix)


def nccl_direct(log: NcclLog) -> Finding | None:
    """Check whether network cards access GPU memory directly."""
    network = sum(n for kind, n in log.channels().items() if kind.startswith("NET/") and kind != "NET/Socket")
    if not network:
        return None
    direct = sum(log.channels("GDRDMA").values())
    found = f"{direct} of {network} connections with GPUDirect RDMA"
    if direct == network:
        return Finding("nccl_gpudirect", "ok", found)
    why = "the other connections copy each gradient through host memory"
    fix = "sudo modprobe nvidia_peermem; if the card is far from the GPU (nvidia-smi topo -m): NCCL_NET_GDR_LEVEL=SYS"
    return Finding("nccl_gpudirect", "warning", found, why, fix)


def nccl_peers(log: NcclLog) -> Finding | None:
    """Check whether GPUs of one host exchange data directly."""
    shared, direct, p2p_off = log.channels()["SHM"], log.channels()["P2P"], bool(log.facts["p2p_off"])
    if not (p2p_off or shared):
        return None
    found = f"{shared} connections through shared memory, {direct} from GPU to GPU"
    if log.is_set("NCCL_P2P_DISABLE"):
        why = "GPUs of one host exchange data through host memory, because NCCL_P2P_DISABLE is set"
        return Finding("nccl_peers", "warning", found, why, "unset NCCL_P2P_DISABLE")
    link = "reports a link that it may not use" if p2p_off else "uses no link between them"
    why = f"GPUs of one host exchange data through host memory: NCCL {link}"
    fix = "nvidia-smi topo -p2p r; switch off PCI access control (ACS), in a virtual machine on its host"
    return Finding("nccl_peers", "warning", found, why, fix)


def nccl_warnings(log: NcclLog) -> Finding | None:
    """Repeat the warnings of NCCL, with known fixes."""
    if not log.warnings:
        return None
    more = f" (and {len(log.warnings) - _SHOWN} more)" if len(log.warnings) > _SHOWN else ""
    fixes = [fix for pattern, fix in _FIXES if any(re.search(pattern, text) for text in log.warnings)]
    fix = "; ".join(fixes) or "read the lines before the first warning in that log"
    why = "NCCL logs a warning when an exchange fails"
    return Finding("nccl_warnings", "broken", "; ".join([*log.warnings][:_SHOWN]) + more, why, fix)


CHECKS: tuple[Callable[[NcclLog], Finding | None], ...] = (
    *(nccl_log, nccl_one_version, nccl_network, nccl_direct, nccl_peers, nccl_warnings),
)
