"""What this machine is and what it gives to a process: cores, memory, limits. Read from the system, without torch."""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hvdtrain.install.open_mpi import has_remote_shell
from hvdtrain.runtime.host import HostFacts, read_host

UNLIMITED = resource.RLIM_INFINITY
_V1_NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class Limits:
    """Soft limits of this process, `UNLIMITED` where there is none; ``most_files`` is what it may raise its own to."""

    files: int = UNLIMITED
    most_files: int = UNLIMITED
    processes: int = UNLIMITED
    locked_bytes: int = UNLIMITED


@dataclass(frozen=True)
class Machine:
    """The machine.

    Attributes:
        host: cores and GPUs.
        system: what the operating system says of itself: kernel, cpu, memory, python.
        processors: hardware threads that the machine has, whatever this process may use.
        cpu_flags: what the processor can do, as the kernel names it.
        memory_bytes: of the machine.
        memory_limit_bytes: of the container or job that this process is in.
        shm_bytes, shm_free_bytes: of /dev/shm; None where there is none.
        huge_pages: the kernel's setting: always, madvise, never; "" where it has none.
        is_root: whether this process is the superuser's.
        remote_shell: whether Open MPI's mpirun finds ssh or rsh.
    """

    host: HostFacts
    system: Mapping[str, str]
    processors: int = 1
    cpu_flags: frozenset[str] = frozenset()
    memory_bytes: int = 0
    memory_limit_bytes: int | None = None
    shm_bytes: int | None = None
    shm_free_bytes: int | None = None
    huge_pages: str = "madvise"
    limits: Limits = field(default_factory=Limits)
    is_root: bool = False
    remote_shell: bool = True


def machine(environ: Mapping[str, str], root: Path = Path("/")) -> Machine:
    """Ask the operating system. ``root``: the file system whose ``sys``, ``proc`` and ``dev`` are asked."""
    cpu = _cpu(root)
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    total, free = _space(root / "dev/shm")
    return Machine(
        host=read_host(environ, root),
        system={
            "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
            "cpu": cpu.get("model name") or platform.machine(),
            "memory": f"{memory_bytes / 2**30:.1f} GiB",
            "python": f"{platform.python_version()} ({sys.executable})",
        },
        processors=os.cpu_count() or 1,
        cpu_flags=frozenset((cpu.get("flags") or cpu.get("Features") or "").split()),
        memory_bytes=memory_bytes,
        memory_limit_bytes=_memory_limit(root),
        shm_bytes=total,
        shm_free_bytes=free,
        huge_pages=_chosen(_text(root / "sys/kernel/mm/transparent_hugepage/enabled")),
        limits=_limits(),
        is_root=os.geteuid() == 0,
        remote_shell=has_remote_shell(environ),
    )


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _cpu(root: Path) -> dict[str, str]:
    """What /proc/cpuinfo says of the first processor."""
    first = _text(root / "proc/cpuinfo").partition("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _space(folder: Path) -> tuple[int | None, int | None]:
    try:
        found = os.statvfs(folder)
    except OSError:
        return None, None
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def _chosen(text: str) -> str:
    """Read the kernel's way to show a choice, such as ``always [madvise] never``."""
    return text.partition("[")[2].partition("]")[0]


def _memory_limit(root: Path) -> int | None:
    """Give the lowest limit of the control groups around this process: version 2, then 1."""
    base, limits = root / "sys/fs/cgroup", []
    for line in _text(root / "proc/self/cgroup").splitlines():
        group = Path(line.split(":", 2)[2].strip("/"))
        for part in (group, *group.parents):
            limits += [_text(base / part / "memory.max"), _text(base / "memory" / part / "memory.limit_in_bytes")]
    numbers = [int(text) for text in limits if text.strip().isdigit()]
    return min((number for number in numbers if number < _V1_NO_LIMIT), default=None)


def _limits() -> Limits:
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Limits(
        files, most, resource.getrlimit(resource.RLIMIT_NPROC)[0], resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    )
