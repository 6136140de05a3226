"""Parsers of lines of Horovod's stall inspector (stall_inspector.cc) and of NCCL (NCCL_DEBUG)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

STALLED = "Horovod stalled "
"""The prefix of every line about a stall, and of no other."""

_MOST = 64
"""Largest number of distinct entries of a kind."""

_SHOWN = 6

_WAITING = re.compile(r"tensors were submitted to be .* for more than (\d+) seconds")
_MISSING = re.compile(r"(?:^|\s)(\d+)(!?): \[(.*?)\]?\s*$")
_OLDER = re.compile(r"^\s*(?:\d+: )?(\S.*?) \[missing ranks:\s*([\d, ]+)\]")
_ENDS = re.compile(r"is stalled for longer than \d+ seconds\. Will shutdown")
_PATIENCE = 100
"""Largest number of other lines within one warning."""

_NCCL = re.compile(r"(?:(\S{1,255}?):(\d+):\d+ )?\[(-?\d+)\] (?:\S+ )?NCCL (WARN|INFO) (.*\S)")
_VERSION = re.compile(r"NCCL version (\d+\.\d+\S*)")
_NETWORK = re.compile(r"Using (?:internal )?network (\w+)", re.IGNORECASE)
_DEVICES = re.compile(r"NET/(\w+) : (Using .*|No device found.*)")
_LINK = re.compile(r"Channel \d+(?:/\d+)? : (\w+)\[\w+\] -> (\w+)\[\w+\].* via (\S+)")
_CHANNELS = re.compile(r"(\d+) coll channels")
_SET = re.compile(r"(NCCL_\w+) set (?:by environment )?to (.*?)\.?$")


@dataclass
class _Stall:
    """How often a rank was missing, for at least how long, and for which tensors."""

    times: int = 0
    seconds: int = 0
    tensors: dict[str, None] = field(default_factory=dict)


class Stalls:
    """Collects warnings of the stall inspector, which have several lines."""

    def __init__(self) -> None:
        self._of_rank: dict[int, _Stall] = {}
        self._warnings = 0
        self._seconds = 0
        self._left = 0
        self._ends = False

    def add_line(self, line: str) -> None:
        """Parse a line of output."""
        if found := _WAITING.search(line):
            self._seconds, self._left = int(found[1]), _PATIENCE
            self._warnings += 1
        elif self._left:
            self._left -= 1
            if found := _OLDER.search(line):
                for rank in re.findall(r"\d+", found[2]):
                    self._add(int(rank), [found[1]])
            elif found := _MISSING.search(line):
                self._add(int(found[1]), [name for name in re.split(r", | \.\.\.", found[3]) if name])
            self._ends |= bool(_ENDS.search(line))

    def end(self) -> None:
        """Note the end of a file."""
        self._left = 0

    def lines(self) -> Iterator[str]:
        """Return a sentence for each stalled rank, the most frequent first."""
        for rank, stall in sorted(self._of_rank.items(), key=lambda item: (-item[1].times, item[0])):
            names = list(stall.tensors)
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            often = "once" if stall.times == 1 else f"{stall.times} times"
            yield (
                f"{STALLED}on rank {rank} for more than {stall.seconds} s, {often}: {', '.join(names[:_SHOWN])}{more}"
            )
        if self._warnings and not self._of_rank:
            yield f"{STALLED}for more than {self._seconds} s; the output does not say on which rank"
        if self._ends:
            yield "Horovod shut the job down for a stall (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS)"

    def _add(self, rank: int, tensors: list[str]) -> None:
        stall = self._of_rank.setdefault(rank, _Stall())
        stall.times += 1
        stall.seconds = max(stall.seconds, self._seconds)
        for name in tensors:
            if len(stall.tensors) < _MOST:
                stall.tensors[name] = None


class Nccl:
    """Collects lines of NCCL."""

    def __init__(self) -> None:
        self._warnings: dict[str, tuple[Counter[str], set[str]]] = {}
        self._found: dict[str, dict[str, set[str]]] = {}
        self._links: dict[str, set[tuple[str, str]]] = {}

    def add_line(self, line: str) -> bool:
        """Parse a line of output; return whether it is one of NCCL's."""
        if "NCCL" not in line:
            return False
        if found := _NCCL.search(line):
            host, process, device, level, text = found.groups()
            by = f"{host}:{process}:{device}"
            if level == "WARN":
                self._warn(text, by)
            else:
                self._inform(text, by)
            return True
        if found := _VERSION.search(line):
            self._note("version", found[1], "")
            return True
        return False

    def lines(self) -> Iterator[str]:
        """Return the warnings, then network, channels, settings and links."""
        for text, (count, ranks) in self._warnings.items():
            times = sum(count.values())
            often = f" ({times} times" if times > 1 else " (once"
            yield f"NCCL warning: {text}{often}, {_ranks(ranks)})"
        for kind, template in (
            ("version", "NCCL {}"),
            ("network", "NCCL uses the network {}"),
            ("devices", "NCCL's network devices: {}"),
            ("channels", "NCCL has {} channels for collectives"),
            ("setting", "NCCL setting {}"),
        ):
            for value, ranks in self._found.get(kind, {}).items():
                yield template.format(value) + (f" ({_ranks(ranks)})" if any(ranks) else "")
        if self._links:
            parts = [f"{kind} between {len(pairs)} pairs" for kind, pairs in sorted(self._links.items())]
            yield f"NCCL's links: {', '.join(parts)}"

    def _warn(self, text: str, by: str) -> None:
        if text in self._warnings or len(self._warnings) < _MOST:
            count, ranks = self._warnings.setdefault(text, (Counter(), set()))
            count[by] += 1
            ranks.add(by)

    def _inform(self, text: str, by: str) -> None:
        if found := _LINK.search(text):
            self._links.setdefault(_kind(found[3]), set()).add((found[1], found[2]))
        elif found := _NETWORK.search(text):
            self._note("network", found[1], by)
        elif found := _DEVICES.search(text):
            self._note("devices", f"{found[1]}: {found[2]}", by)
        elif found := _CHANNELS.search(text):
            self._note("channels", found[1], by)
        elif found := _SET.search(text):
            self._note("setting", f"{found[1]}={found[2]}", by)

    def _note(self, kind: str, value: str, by: str) -> None:
        values = self._found.setdefault(kind, {})
        if value in values or len(values) < _MOST:
            values.setdefault(value, set()).add(by)


def _kind(via: str) -> str:
    """Drop device numbers: ``NET/IB/0/GDRDMA`` becomes NET/IB/GDRDMA."""
    return "/".join(part for part in via.split("/") if not part.isdigit() and part != "read")


def _ranks(ranks: set[str]) -> str:
    return f"{len(ranks)} GPU{'' if len(ranks) == 1 else 's'}"
