"""Wait for a process, and read its state, session, CPU time and start from /proc/PID/stat. A leaf.

psutil reports the start as a time of the wall clock, so two readers differ when somebody sets the clock between them.
The kernel's count since boot identifies a process together with its number.
"""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")


class ProcessStat(NamedTuple):
    """Facts about one process."""

    state: str  # the kernel's letter: T is stopped, Z a zombie, X dead
    session: int  # number of the process that leads its session
    cpu_s: float  # seconds of CPU time, its own and that of children it has waited for
    start_ticks: int  # its start, in clock ticks since boot


def read_stat(pid: int, root: Path = PROC) -> ProcessStat:
    """Read the facts about a process.

    Errors: FileNotFoundError or ProcessLookupError if there is none; OSError, as without a free file descriptor.
    """
    text = (root / str(pid) / "stat").read_text(errors="replace")
    fields = text.rpartition(")")[2].split()  # the field before, the program's name, may hold blanks and brackets
    if not fields:
        raise OSError(f"{root}/{pid}/stat is empty")
    ticks = sum(map(int, fields[11:15]))
    return ProcessStat(fields[0], int(fields[3]), ticks / os.sysconf("SC_CLK_TCK"), int(fields[19]))


def wait_with_signals(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process and return its exit code. Signal handlers of Python run within a second meanwhile.

    A plain ``wait()`` can miss a signal: one that arrives just before the system call begins does not interrupt it, and
    Python runs the handler only when the call returns, which is at the end of the process.
    """
    waiter = threading.Thread(target=process.wait, daemon=True)
    waiter.start()
    while waiter.is_alive():
        waiter.join(1.0)
    return process.wait()
