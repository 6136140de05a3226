"""Read and check a log that NCCL wrote with ``NCCL_DEBUG=INFO``: how GPUs are connected, and warnings. Pure.

The format is that of NCCL 2.4 to 2.29: ``host:pid:tid [device] NCCL INFO text``. Unknown lines are ignored.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from hvdtrain.doctor.finding import Finding

_LINE = re.compile(r"(?:(?P<host>[^\s:\]]+):\d+:\d+ \[\d+\] )?NCCL (?P<level>INFO|WARN|ERROR) (?P<text>.*)")
_VERSION = re.compile(r"NCCL version (\d+(?:\.\d+)+)")
_CHANNEL = re.compile(r"\bvia (?:(P2P|SHM)\b|NET/([^/]+))")
_INTERFACE = re.compile(r"(?:Bootstrap : Using |NET/Socket : Using |OOB )(.*)")
_NAME = re.compile(r"(?:\[\d+\])?([A-Za-z][\w.-]*):[\d.a-fA-F:]+<")
_CARD = re.compile(r"\[\d+\]([\w.-]+):\d+/(?:IB|RoCE|uverbs)")
_SET = re.compile(r"(NCCL_\w+) set by environment to (.*?)\.?$")
_SIZES = re.compile(r"nRanks (\d+) nNodes (\d+)|nranks (\d+)", re.IGNORECASE)
_NO_IB = "NET/IB : No device found"
_P2P_OFF = "P2P is disabled between connected GPUs"

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


@dataclass(frozen=True)
class NcclLog:
    """The content of a log."""

    name: str = "NCCL's log"  # of the file
    versions: tuple[str, ...] = ()  # all versions of NCCL in the log
    hosts: tuple[str, ...] = ()  # hosts that wrote lines
    ranks: int = 0  # of the largest communicator; 0 if unknown
    nodes: int = 0  # of the same communicator
    channels: Mapping[str, int] = field(default_factory=dict)  # connections by kind: P2P, SHM, NET/IB, NET/Socket ...
    direct: int = 0  # number of network connections that access GPU memory directly
    interfaces: tuple[str, ...] = ()  # that NCCL uses for TCP
    cards: tuple[str, ...] = ()  # that NCCL found for InfiniBand or RoCE
    no_ib: bool = False  # whether NCCL searched for InfiniBand and found none
    p2p_off: bool = False  # whether NCCL may not use an existing link between GPUs
    settings: Mapping[str, str] = field(default_factory=dict)  # variables of NCCL that were set
    warnings: tuple[str, ...] = ()  # their texts, without repetitions

    @property
    def between_hosts(self) -> bool:
        """Whether the job had several hosts."""
        return max(self.nodes, len(self.hosts)) > 1


def read_nccl_log(lines: Iterable[str], name: str) -> NcclLog:
    """Read a log of any number of ranks. It may contain lines of other programs."""
    own = [line for line in lines if "NCCL" in line]
    found = [line for line in map(_LINE.search, own) if line]
    texts = [line["text"].strip() for line in found]
    channels = [(channel, text) for text in texts if (channel := _CHANNEL.search(text))]
    addresses = [part[1] for part in map(_INTERFACE.search, texts) if part]
    sizes = [(int(size[1] or size[3]), int(size[2] or 0)) for size in map(_SIZES.search, texts) if size]
    ranks, nodes = max(sizes, default=(0, 0))
    return NcclLog(
        name,
        versions=_unique(version for line in own for version in _VERSION.findall(line)),
        hosts=_unique(line["host"] for line in found if line["host"]),
        ranks=ranks,
        nodes=nodes,
        channels=Counter(channel[1] or f"NET/{channel[2].strip()}" for channel, _ in channels),
        direct=sum("GDRDMA" in text for _, text in channels),
        interfaces=_unique(interface for part in addresses for interface in _NAME.findall(part)),
        cards=_unique(card for text in texts if "NET/IB : Using" in text for card in _CARD.findall(text)),
        no_ib=any(_NO_IB in text for text in texts),
        p2p_off=any(_P2P_OFF in text for text in texts),
        settings={setting[1]: setting[2] for setting in map(_SET.search, texts) if setting},
        warnings=_unique(text for line, text in zip(found, texts, strict=True) if line["level"] != "INFO"),
    )


def fabric(log: NcclLog, cards: Iterable[str] = ()) -> str:
    """Describe what NCCL uses, such as ``NET/IB mlx5_0``; "" if the log does not show it. `cards`: of this host."""
    kinds = [kind for kind in log.channels if kind.startswith("NET/")]
    used = {"NET/IB": log.cards, "NET/Socket": log.interfaces}
    text = ", ".join(" ".join([kind, *used.get(kind, ())]) for kind in kinds or log.channels)
    unused = ", ".join(cards)
    return f"{text} (although there are {unused})" if "NET/Socket" in kinds and unused else text


def _unique(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))


def nccl_log(log: NcclLog) -> Finding:
    """Check that the file is a log of NCCL, and summarize it."""
    if not (log.versions or log.hosts or log.warnings):
        return Finding("nccl_log", "warning", log.name, "it has no line from NCCL", f"write one: {_WRITE_ONE}")
    size = f", {log.ranks} ranks" if log.ranks else ""
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
    if not (log.between_hosts or any(kind.startswith("NET/") for kind in log.channels)):
        return None
    kinds = {kind: number for kind, number in log.channels.items() if kind.startswith("NET/")}
    found = ", ".join(f"{number} connections over {kind}" for kind, number in kinds.items()) or "no connection logged"
    found += f", TCP on {', '.join(log.interfaces)}" if log.interfaces else ""
    local = [name for name in log.interfaces if name == "lo" or name.startswith(("docker", "veth", "virbr"))]
    if local and log.between_hosts:
        why = f"{', '.join(local)} leads to no other host"
        return Finding("nccl_network", "broken", found, why, "NCCL_SOCKET_IFNAME=^lo,docker,veth,virbr")
    if "NET/Socket" not in kinds:
        return Finding("nccl_network", "ok", found)
    if log.settings.get("NCCL_IB_DISABLE", "0") != "0":
        why = "gradients are sent over TCP by the CPU, because NCCL_IB_DISABLE is set"
        return Finding("nccl_network", "warning", found, why, "unset NCCL_IB_DISABLE")
    why = f"gradients are sent over TCP by the CPU: NCCL {'found' if log.no_ib else 'chose'} no InfiniBand"
    fix = "if there is a card, check /dev/infiniband in the container and apt-get install libibverbs1 ibverbs-providers"
    return Finding("nccl_network", "warning", found, why, fix)


def nccl_direct(log: NcclLog) -> Finding | None:
    """Check whether network cards access GPU memory directly."""
    network = sum(number for kind, number in log.channels.items() if kind.startswith("NET/") and kind != "NET/Socket")
    if not network:
        return None
    found = f"{log.direct} of {network} connections with GPUDirect RDMA"
    if log.direct == network:
        return Finding("nccl_gpudirect", "ok", found)
    why = "the other connections copy each gradient through host memory"
    fix = "sudo modprobe nvidia_peermem; if the card is far from the GPU (nvidia-smi topo -m): NCCL_NET_GDR_LEVEL=SYS"
    return Finding("nccl_gpudirect", "warning", found, why, fix)


def nccl_peers(log: NcclLog) -> Finding | None:
    """Check whether GPUs of one host exchange data directly."""
    if not (log.p2p_off or log.channels.get("SHM")):
        return None
    shared, direct = log.channels.get("SHM", 0), log.channels.get("P2P", 0)
    found = f"{shared} connections through shared memory, {direct} from GPU to GPU"
    if log.settings.get("NCCL_P2P_DISABLE", "0") != "0":
        why = "GPUs of one host exchange data through host memory, because NCCL_P2P_DISABLE is set"
        return Finding("nccl_peers", "warning", found, why, "unset NCCL_P2P_DISABLE")
    link = "reports a link that it may not use" if log.p2p_off else "uses no link between them"
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
    return Finding("nccl_warnings", "broken", "; ".join(log.warnings[:_SHOWN]) + more, why, fix)


CHECKS: tuple[Callable[[NcclLog], Finding | None], ...] = (
    *(nccl_log, nccl_one_version, nccl_network, nccl_direct, nccl_peers, nccl_warnings),
)
