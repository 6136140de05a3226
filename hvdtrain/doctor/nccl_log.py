"""Read a log that NCCL wrote with ``NCCL_DEBUG=INFO``: how GPUs are connected, and warnings. Pure.

The format is that of NCCL 2.4 to 2.29: ``host:pid:tid [device] NCCL INFO text``. Unknown lines are ignored.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

_LINE = re.compile(r"(?:(?P<host>[^\s:\]]+):\d+:\d+ \[\d+\] )?NCCL (?P<level>INFO|WARN|ERROR) (?P<text>.*)")
_VERSION = re.compile(r"NCCL version (\d+(?:\.\d+)+)")
_CHANNEL = re.compile(r"\bvia (?:(P2P|SHM)\b|NET/([^/]+))")
_INTERFACE = re.compile(r"(?:Bootstrap : Using |NET/Socket : Using |OOB )(.*)")
_NAME = re.compile(r"(?:\[\d+\])?([A-Za-z][\w.-]*):[\d.a-fA-F:]+<")
_SET = re.compile(r"(NCCL_\w+) set by environment to (.*?)\.?$")
_SIZES = re.compile(r"nRanks (\d+) nNodes (\d+)|nranks (\d+)", re.IGNORECASE)
_NO_IB = "NET/IB : No device found"
_P2P_OFF = "P2P is disabled between connected GPUs"


@dataclass(frozen=True)
class NcclLog:
    """The content of a log.

    Attributes:
        name: name of the file.
        versions: all versions of NCCL in the log.
        hosts: hosts that wrote lines.
        ranks, nodes: size of the largest communicator; 0 if unknown.
        channels: number of connections by kind: P2P, SHM, NET/IB, NET/Socket and so on.
        direct: number of network connections that access GPU memory directly.
        interfaces: interfaces that NCCL uses for TCP.
        no_ib: whether NCCL searched for InfiniBand and found none.
        p2p_off: whether NCCL may not use an existing link between GPUs.
        settings: variables of NCCL that were set.
        warnings: texts of the warnings, without repetitions.
    """

    name: str = "NCCL's log"
    versions: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    ranks: int = 0
    nodes: int = 0
    channels: Mapping[str, int] = field(default_factory=dict)
    direct: int = 0
    interfaces: tuple[str, ...] = ()
    no_ib: bool = False
    p2p_off: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

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
        no_ib=any(_NO_IB in text for text in texts),
        p2p_off=any(_P2P_OFF in text for text in texts),
        settings={setting[1]: setting[2] for setting in map(_SET.search, texts) if setting},
        warnings=_unique(text for line, text in zip(found, texts, strict=True) if line["level"] != "INFO"),
    )


def _unique(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))
