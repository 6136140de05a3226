"""What the kernel knows of processes of this host: whether they live, and their memory. Read from /proc."""

from __future__ import annotations

import sys
from pathlib import Path

from hvdtrain.processes import read_stat

RUNNING, STOPPED, ZOMBIE, GONE, UNKNOWN = "running", "stopped", "zombie", "gone", "unknown"
"""States of a process; "unknown" is that of one which this host cannot see, or cannot look at now."""

UNREACHABLE = "unreachable"
"""In the place of "unknown": no run folder is shared with that rank, and its silence means nothing."""

DEAD = (ZOMBIE, GONE)

_STATES = {"T": STOPPED, "t": STOPPED, "Z": ZOMBIE, "X": GONE, "x": GONE}
_MIB_OF_KIB = 1 / 1024
_MIB = 1 << 20


def started(pid: int, root: Path = Path("/proc")) -> int | None:
    """When a process began, in clock ticks since the host did: with it a number that was given anew is told apart."""
    try:
        return read_stat(pid, root).start_ticks
    except OSError:
        return None


def state(pid: int, began: int, root: Path = Path("/proc")) -> str:
    """How the process `pid` that began at `began` is: one of the states above."""
    try:
        stat = read_stat(pid, root)
    except (FileNotFoundError, ProcessLookupError):
        return GONE
    except OSError:  # this process has no file descriptor left, say: that tells nothing of the other one
        return UNKNOWN
    return _STATES.get(stat.state, RUNNING) if stat.start_ticks == began else GONE


def memory(root: Path = Path("/proc"), *, device: bool = False) -> dict[str, float]:
    """Memory of this process and host, in MiB: rss, peak_rss, host_total, host_available; what is unknown is left out.

    Args:
        root: where the kernel's figures are.
        device: cuda_allocated, cuda_peak and cuda_reserved too. Not for a thread beside one that may hang in CUDA:
            the allocator's lock could be held there.
    """
    own, host = _figures(root / "self/status"), _figures(root / "meminfo")
    names = {"rss": (own, "VmRSS"), "peak_rss": (own, "VmHWM")}
    names |= {"host_total": (host, "MemTotal"), "host_available": (host, "MemAvailable")}
    found = {name: round(table[key] * _MIB_OF_KIB, 1) for name, (table, key) in names.items() if key in table}
    torch = sys.modules.get("torch")
    if device and torch is not None and torch.cuda.is_initialized():
        found["cuda_allocated"] = round(torch.cuda.memory_allocated() / _MIB, 1)
        found["cuda_peak"] = round(torch.cuda.max_memory_allocated() / _MIB, 1)
        found["cuda_reserved"] = round(torch.cuda.memory_reserved() / _MIB, 1)
    return found


def oom_kills(root: Path = Path("/proc")) -> int:
    """How many processes this host's kernel has killed for want of memory since it began, containers' included."""
    for line in _text(root / "vmstat").splitlines():
        name, _, count = line.partition(" ")
        if name == "oom_kill":
            return int(count)
    return 0


def _figures(path: Path) -> dict[str, int]:
    """Lines such as ``VmRSS:  1024 kB``, in KiB."""
    found = {}
    for line in _text(path).splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB":
            found[name] = int(words[0])
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
