"""What this machine is and what it gives to a process."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.runtime.host import HostFacts, read_host


@dataclass(frozen=True)
class Machine:
    """The machine.

    Attributes:
        host: cores and GPUs.
        system: what the operating system says of itself: kernel, cpu, memory, python.
    """

    host: HostFacts
    system: Mapping[str, str]


def machine(environ: Mapping[str, str]) -> Machine:
    """Ask the operating system."""
    return Machine(read_host(environ), _system())


def _system() -> dict[str, str]:
    cpu = next((line for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "")
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu.partition(":")[2].strip() or platform.machine(),
        "memory": f"{memory_bytes / 2**30:.1f} GiB",
        "python": f"{platform.python_version()} ({sys.executable})",
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
