"""Read states and memory of processes of this host from /proc."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from hvdtrain.files import read_text_or_empty
from hvdtrain.programs import read_stat

RUNNING, STOPPED, ZOMBIE, GONE, UNKNOWN = "running", "stopped", "zombie", "gone", "unknown"
"""States of a process. "unknown": this host cannot see the process, or cannot read its state now."""

UNREACHABLE = "unreachable"
"""Used instead of "unknown" for a rank that does not share the run folder: its silence means nothing."""

DEAD = (ZOMBIE, GONE)

_STATES = {"T": STOPPED, "t": STOPPED, "Z": ZOMBIE, "X": GONE, "x": GONE}
_MEMORY = {"rss": "VmRSS", "peak_rss": "VmHWM", "host_total": "MemTotal", "host_available": "MemAvailable"}
_MIB = 1 << 20


def started(pid: int, root: Path = Path("/proc")) -> int | None:
    """Return when a process began, in clock ticks since boot. A later process with the same ID differs in it."""
    try:
        return read_stat(pid, root).start_ticks
    except OSError:
        return None


def state(pid: int, began: int, root: Path = Path("/proc")) -> str:
    """Return the state of the process `pid` that began at `began`."""
    try:
        stat = read_stat(pid, root)
    except (FileNotFoundError, ProcessLookupError):
        return GONE
    except OSError:  # such as no file descriptor left in this process: says nothing about the other one
        return UNKNOWN
    return _STATES.get(stat.state, RUNNING) if stat.start_ticks == began else GONE


def memory(root: Path = Path("/proc"), *, device: bool = False) -> dict[str, float]:
    """Return rss, peak_rss, host_total, host_available in MiB, of this process and host. Unknown ones are absent.

    `device` adds cuda_allocated, cuda_peak and cuda_reserved. It is not allowed while another thread may hang in CUDA:
    that may hold the allocator's lock.
    """
    kib = {**_figures(root / "self/status"), **_figures(root / "meminfo")}
    found = {name: round(kib[key] / 1024, 1) for name, key in _MEMORY.items() if key in kib}
    torch = sys.modules.get("torch")
    if device and torch is not None and torch.cuda.is_initialized():
        found["cuda_allocated"] = round(torch.cuda.memory_allocated() / _MIB, 1)
        found["cuda_peak"] = round(torch.cuda.max_memory_allocated() / _MIB, 1)
        found["cuda_reserved"] = round(torch.cuda.memory_reserved() / _MIB, 1)
    return found


def oom_kills(root: Path = Path("/proc")) -> int:
    """Return how many processes the kernel has killed since boot because memory ran out, containers included."""
    found = re.search(r"^oom_kill (\d+)$", read_text_or_empty(root / "vmstat"), re.MULTILINE)
    return int(found[1]) if found else 0


def _figures(path: Path) -> dict[str, int]:
    """Parse lines such as ``VmRSS:  1024 kB``, in KiB."""
    return {name: int(kib) for name, kib in re.findall(r"^(\S+):\s+(\d+) kB$", read_text_or_empty(path), re.MULTILINE)}
