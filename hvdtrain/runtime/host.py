"""Facts about this host: cores, GPUs, huge pages. Read from the system, without torch."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from hvdtrain.files import read_text_or_empty


@dataclass(frozen=True)
class HostFacts:
    """Facts about this host."""

    cores: int = 1  # physical cores for all ranks of this host, within cgroup limits
    own_cores: int = 1  # physical cores for this process; fewer than `cores` where the launcher bound it
    gpus: int = 0  # CUDA devices for torch; 0 where torch is built without CUDA
    huge_pages: bool = True  # whether memory may use transparent huge pages
    quota: bool = False  # whether the CPU time of a container is limited, whatever its cores
    fabric: bool = False  # whether MPI may use another network than TCP, such as InfiniBand


def read_host(environ: Mapping[str, str], root: Path = Path("/")) -> HostFacts:
    """Read the facts. ``root``: the root of the file system with ``sys``, ``proc`` and ``dev``."""
    own = frozenset(os.sched_getaffinity(0))
    try:  # the launcher has the job's mask; this process may be bound to a part of it
        launcher = os.sched_getaffinity(os.getppid())
    except OSError:
        launcher = set(own)
    bound = len(own) < len(launcher)
    online = os.cpu_count() or 1
    allowed = frozenset(range(online)) if bound else own
    allowed = allowed & _cpuset(root) or allowed
    quota = _quota(root)
    cores = max(1, min(physical_cores(root, allowed), quota or online))
    own_cores = physical_cores(root, own) if bound else cores
    huge_pages = "[never]" not in read_text_or_empty(root / "sys/kernel/mm/transparent_hugepage/enabled")
    # InfiniBand, RoCE, Omni-Path and EFA have one folder, Slingshot has another
    fabric = any(any((root / "sys/class" / kind).glob("*")) for kind in ("infiniband", "cxi"))
    return HostFacts(cores, own_cores, _gpus(environ, root), huge_pages, quota is not None, fabric)


def cpu_list(text: str) -> frozenset[int]:
    """Parse the kernel's notation of a set of CPUs, such as ``0-3,8``."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def cpu_ranges(cpus: Collection[int]) -> str:
    """Format numbers in the kernel's notation, such as ``0-3,8``; the inverse of `cpu_list`."""
    own = frozenset(cpus)
    starts = sorted(cpu for cpu in own if cpu - 1 not in own)
    ends = sorted(cpu for cpu in own if cpu + 1 not in own)
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def physical_cores(root: Path, cpus: frozenset[int]) -> int:
    """Count cores; the hardware threads of a core count once."""
    folder = root / "sys/devices/system/cpu"
    return len({read_text_or_empty(folder / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in cpus})


def cgroup_folders(root: Path, controller: str) -> list[Path]:
    """Return the folders with this process's limits, innermost first: cgroup v2, then v1 as containers mount it."""
    base = root / "sys/fs/cgroup"
    groups = dict.fromkeys(
        line.split(":", 2)[2].strip("/") for line in read_text_or_empty(root / "proc/self/cgroup").splitlines()
    )
    nested = [base / kind / group for group in groups if group for kind in ("", controller)]
    return [*nested, base, base / controller]


def _cpuset(root: Path) -> frozenset[int]:
    for folder in cgroup_folders(root, "cpuset"):
        for name in ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"):
            if cpus := cpu_list(read_text_or_empty(folder / name)):
                return cpus
    return frozenset()


def _quota(root: Path) -> int | None:
    """Return the number of CPUs' worth of time of a container, as Kubernetes and ``docker --cpus`` limit it."""
    for folder in cgroup_folders(root, "cpu"):
        quota, _, period = read_text_or_empty(folder / "cpu.max").partition(" ")
        if not quota:
            quota, period = (read_text_or_empty(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        if quota.strip().isdigit() and period.strip().isdigit():
            return max(1, int(quota) // int(period))
    return None


def _gpus(environ: Mapping[str, str], root: Path) -> int:
    torch = find_spec("torch")
    if torch is None or torch.origin is None or not (Path(torch.origin).parent / "lib/libtorch_cuda.so").exists():
        return 0
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    devices = sum(path.name[6:].isdigit() for path in (root / "dev").glob("nvidia*"))
    if visible is None:
        return devices
    return min(devices, len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))
