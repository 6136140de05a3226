"""Messages of Horovod's stall inspector and of NCCL in a job's output, each once with its count and source.

The stall inspector is stall_inspector.cc. NCCL writes its lines by NCCL_DEBUG, between lines of other programs; the
format is that of NCCL 2.4 to 2.29: ``host:pid:tid [device] NCCL INFO text``. Unknown lines are ignored.
"""

from __future__ import annotations

import glob
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from hvdtrain.errors import listed
from hvdtrain.files import open_regular
from hvdtrain.timeline.read import unreadable
from hvdtrain.timeline.wording import counted

STALLED = "Horovod stalled "
"""The prefix of every line about a stall, and of no other."""

_TAG = re.compile(r"\[\d+(?:,\d+)?\](?:\[\S+\])?<(?:stdout|stderr|stddiag)>:? ?")
"""Prefix of mpirun --tag-output and horovodrun. Open MPI also inserts it within a line."""

_LONGEST = 1 << 14
_LOGS = ("*.log", "*.out", "*.err", "output/**/*")
_MOST = 64
"""Largest number of distinct entries of a kind."""

_SHOWN = 6

_WAITING = re.compile(r"tensors were submitted to be .* for more than (\d+) seconds")
_MISSING = re.compile(r"(?:^|\s)(\d+)(!?): \[(.*?)\]?\s*$")
_ENDS = re.compile(r"is stalled for longer than \d+ seconds\. Will shutdown")
_PATIENCE = 100
"""Largest number of other lines within one warning."""

_SETUP = {
    "version": "NCCL {}",
    "network": "NCCL uses the network {}",
    "device": "NCCL's network devices: {}: {}",
    "channels": "NCCL has {} channels for collectives",
    "setting": "NCCL setting {}={}",
    "p2p_off": "NCCL: {}",
}
"""What is reported of NCCL's lines, by kind."""


def collect_lines(paths: Sequence[Path]) -> list[str]:
    """Return lines about stalled ranks, NCCL's warnings, its network and links, from output of one rank or of all.

    A file that occurs twice is read once.

    Errors: TraceError: a file cannot be read.
    """
    stalls, nccl = _Stalls(), NcclLines()
    for path in dict.fromkeys(path.resolve() for path in paths):
        for line in _lines(path):
            if not nccl.add_line(line):
                stalls.add_line(line)
        stalls.left = 0
    return [*stalls.lines(), *_nccl_lines(nccl)]


def find_logs(run: Path, nccl_debug_file: str | None = None) -> list[Path]:
    """Find the output files of a run.

    These are ``*.log, *.out, *.err`` in its folder, the files in ``output/``, and NCCL_DEBUG_FILE, an absolute path in
    which %h is the host and %p the process.
    """
    found = {path for pattern in _LOGS for path in run.glob(pattern) if path.is_file()}
    if nccl_debug_file:
        pattern = re.sub("%[hp]", "*", glob.escape(nccl_debug_file))
        found |= {path for path in Path("/").glob(pattern.lstrip("/")) if path.is_file()}
    return sorted(found)


def _lines(path: Path) -> Iterator[str]:
    """Yield lines without the prefixes of launchers."""
    try:
        with open_regular(path) as file:
            for raw in iter(lambda: file.readline(_LONGEST), b""):
                text = _TAG.sub("", raw.decode("utf-8", "replace"))
                yield from (line for line in text.splitlines() if line.strip())
    except OSError as error:
        raise unreadable(f"output {path}", error) from None


@dataclass
class _Stall:
    """How often a rank was missing, for at least how long, and for which tensors."""

    times: int = 0
    seconds: int = 0
    tensors: dict[str, None] = field(default_factory=dict)


class _Stalls:
    """Collects warnings of the stall inspector, which have several lines: at most `left` more of the current one."""

    def __init__(self) -> None:
        self._of_rank: dict[int, _Stall] = {}
        self._warnings = 0
        self._seconds = 0
        self.left = 0
        self._ends = False

    def add_line(self, line: str) -> None:
        """Parse a line of output."""
        if found := _WAITING.search(line):
            self._seconds, self.left = int(found[1]), _PATIENCE
            self._warnings += 1
        elif self.left:
            self.left -= 1
            if found := _MISSING.search(line):
                self._add(int(found[1]), [name for name in re.split(r", | \.\.\.", found[3]) if name])
            self._ends |= bool(_ENDS.search(line))

    def lines(self) -> Iterator[str]:
        """Return a sentence for each stalled rank, the most frequent first."""
        for rank, stall in sorted(self._of_rank.items(), key=lambda item: (-item[1].times, item[0])):
            often = "once" if stall.times == 1 else f"{stall.times} times"
            yield f"{STALLED}on rank {rank} for more than {stall.seconds} s, {often}: {listed(stall.tensors, _SHOWN)}"
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


_MOST_NCCL = 1024
"""Largest number of distinct entries of a kind, except links."""

_LINE = re.compile(r"(?:(?:(\S{1,255}?):(\d+):\d+ )?\[(-?\d+)\] (?:\S+ )?)?NCCL (WARN|INFO|ERROR) (.*\S)")
_VERSION = re.compile(r"NCCL version (\d+\.\d+\S*)")
_KINDS = {
    "network": re.compile(r"Using (?:internal )?network (\w+)", re.IGNORECASE),
    "bootstrap": re.compile(r"Bootstrap : Using (.*)"),
    "device": re.compile(r"NET/(\w+) : (Using .*|No device found.*)"),
    "channels": re.compile(r"(\d+) coll channels"),
    "setting": re.compile(r"(NCCL_\w+) set (?:by environment )?to (.*?)\.?$"),
    "link": re.compile(r"(?:Channel|Ring) \d+(?:/\d+)? : (\w+)\[\w+\] -> (\w+)\[\w+\].* via (.+)"),
    "p2p_off": re.compile(r"(P2P is disabled between connected GPUs)"),
}
"""What is read of a line, by kind; the first that matches counts."""


class NcclLines:
    """What NCCL's lines say: by kind, and the texts of warnings, each with the GPUs that wrote it and how often."""

    def __init__(self) -> None:
        self.facts: defaultdict[str, dict[tuple[str, ...], Counter[str]]] = defaultdict(dict)
        self.warnings: dict[str, Counter[str]] = {}

    def add_line(self, line: str) -> bool:
        """Read a line of output; return whether it is one of NCCL's."""
        if "NCCL" not in line:
            return False
        version, found = _VERSION.search(line), _LINE.search(line)
        if version:
            self._add("version", version.groups(), "")
        if found is None:
            return version is not None
        host, process, device, level, text = found.groups()
        by = f"{host}:{process}:{device}"
        if level != "INFO":
            if text in self.warnings or len(self.warnings) < _MOST_NCCL:
                self.warnings.setdefault(text, Counter())[by] += 1
            return True
        for kind, pattern in _KINDS.items():
            if match := pattern.search(text):
                self._add(kind, match.groups(default=""), by)
                break
        return True

    def _add(self, kind: str, values: tuple[str, ...], by: str) -> None:
        known = self.facts[kind]
        if values in known or kind == "link" or len(known) < _MOST_NCCL:
            known.setdefault(values, Counter())[by] += 1


def _nccl_lines(nccl: NcclLines) -> Iterator[str]:
    """Yield the warnings, then version, network, channels, settings and links."""
    for text, count in islice(nccl.warnings.items(), _MOST):
        times = sum(count.values())
        often = f" ({times} times" if times > 1 else " (once"
        yield f"NCCL warning: {text}{often}, {counted(len(count), 'GPU')})"
    for kind, template in _SETUP.items():
        for values, gpus in islice(nccl.facts[kind].items(), _MOST):
            yield template.format(*values) + (f" ({counted(len(gpus), 'GPU')})" if any(gpus) else "")
    links: dict[str, set[tuple[str, str]]] = {}
    for source, target, via in nccl.facts["link"]:
        # without device numbers: NET/IB/0/GDRDMA is NET/IB/GDRDMA
        kind = "/".join(part for part in via.split()[0].split("/") if not part.isdigit() and part != "read")
        links.setdefault(kind, set()).add((source, target))
    if links:
        parts = [f"{kind} between {len(pairs)} pairs" for kind, pairs in sorted(links.items())]
        yield f"NCCL's links: {', '.join(parts)}"
