"""What NCCL wrote of itself under ``NCCL_DEBUG=INFO``: how GPUs reach each other, and what it warned of. Pure.

The lines were read in logs of NCCL 2.4 to 2.29, each as ``host:pid:tid [device] NCCL INFO text``; what is not known is
passed over.
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
    """What a log tells.

    Attributes:
        name: of the file.
        versions: of NCCL, all that were named.
        hosts: that wrote lines.
        ranks, nodes: of the largest communicator; 0 where that is not told.
        channels: how many connections of each kind: P2P, SHM, NET/IB, NET/Socket and so on.
        direct: how many of those by network reach GPU memory without the host's.
        interfaces: names of those by which NCCL talks TCP.
        no_ib: whether it looked for InfiniBand and found none.
        p2p_off: whether GPUs that have a link are kept from using it.
        settings: of NCCL's variables that were set.
        warnings: texts of its warnings, each once.
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
        """Whether it is of a job of several hosts."""
        return max(self.nodes, len(self.hosts)) > 1


def read_nccl_log(lines: Iterable[str], name: str) -> NcclLog:
    """Read a log, of any number of ranks and with the lines of other programs in between."""
    own = [line for line in lines if "NCCL" in line]
    found = [line for line in map(_LINE.search, own) if line]
    texts = [line["text"].strip() for line in found]
    channels = [(channel, text) for text in texts if (channel := _CHANNEL.search(text))]
    addresses = [part[1] for part in map(_INTERFACE.search, texts) if part]
    sizes = [(int(size[1] or size[3]), int(size[2] or 0)) for size in map(_SIZES.search, texts) if size]
    ranks, nodes = max(sizes, default=(0, 0))
    return NcclLog(
        name,
        versions=_each_once(version for line in own for version in _VERSION.findall(line)),
        hosts=_each_once(line["host"] for line in found if line["host"]),
        ranks=ranks,
        nodes=nodes,
        channels=Counter(channel[1] or f"NET/{channel[2].strip()}" for channel, _ in channels),
        direct=sum("GDRDMA" in text for _, text in channels),
        interfaces=_each_once(interface for part in addresses for interface in _NAME.findall(part)),
        no_ib=any(_NO_IB in text for text in texts),
        p2p_off=any(_P2P_OFF in text for text in texts),
        settings={setting[1]: setting[2] for setting in map(_SET.search, texts) if setting},
        warnings=_each_once(text for line, text in zip(found, texts, strict=True) if line["level"] != "INFO"),
    )


def _each_once(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))
