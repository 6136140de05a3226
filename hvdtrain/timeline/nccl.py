"""Read what NCCL writes by NCCL_DEBUG, in output of one rank or of many, between lines of other programs. Pure.

The format is that of NCCL 2.4 to 2.29: ``host:pid:tid [device] NCCL INFO text``. Unknown lines are ignored.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict

_MOST = 1024
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
            if text in self.warnings or len(self.warnings) < _MOST:
                self.warnings.setdefault(text, Counter())[by] += 1
            return True
        for kind, pattern in _KINDS.items():
            if match := pattern.search(text):
                self._add(kind, match.groups(default=""), by)
                break
        return True

    def _add(self, kind: str, values: tuple[str, ...], by: str) -> None:
        known = self.facts[kind]
        if values in known or kind == "link" or len(known) < _MOST:
            known.setdefault(values, Counter())[by] += 1
