"""What this host offers to the ranks on it: cores, GPUs, huge pages. Read from the system, without torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from hvdtrain.regular import read_text_or_empty


@dataclass(frozen=True)
class HostFacts:
    """Attributes, all of this host.

    cores: physical cores that all ranks of this host share, after cgroup limits.
    own_cores: physical cores that this process may run on; fewer than `cores` where the launcher bound it.
    gpus: CUDA devices that torch can use; 0 where torch is built without CUDA.
    huge_pages: whether memory may get transparent huge pages.
    quota: whether a container's share of processor time is limited, whatever the cores it may use.
    fabric: whether there is a network that MPI may use by other means than TCP, such as InfiniBand.
    """

    cores: int = 1
    own_cores: int = 1
    gpus: int = 0
    huge_pages: bool = True
    quota: bool = False
    fabric: bool = False


def read_host(environ: Mapping[str, str], root: Path = Path("/")) -> HostFacts:
    """Read the facts. ``root``: the file system whose ``sys``, ``proc`` and ``dev`` are asked."""
    own = frozenset(os.sched_getaffinity(0))
    try:  # the launcher's mask is that of the job; ours may be the part that it bound us to
        launcher = os.sched_getaffinity(os.getppid())
    except OSError:
        launcher = set(own)
    bound = len(own) < len(launcher)
    online = os.cpu_count() or 1
    allowed = frozenset(range(online)) if bound else own
    allowed = allowed & _cpuset(root) or allowed
    quota = _quota(root)
    cores = max(1, min(_physical(root, allowed), quota or online))
    own_cores = _physical(root, own) if bound else cores
    return HostFacts(cores, own_cores, _gpus(environ, root), _huge_pages(root), quota is not None, _fabric(root))


def cpu_list(text: str) -> frozenset[int]:
    """Read the kernel's notation of a set of processors, such as ``0-3,8``."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def _physical(root: Path, cpus: frozenset[int]) -> int:
    """Count cores; the hardware threads of one are taken together."""
    folder = root / "sys/devices/system/cpu"
    return len({read_text_or_empty(folder / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in cpus})


def _cgroup(root: Path, controller: str) -> list[Path]:
    """List the folders that limit this process, the innermost first: cgroup v2, then v1 as containers mount it."""
    base = root / "sys/fs/cgroup"
    groups = dict.fromkeys(
        line.split(":", 2)[2].strip("/") for line in read_text_or_empty(root / "proc/self/cgroup").splitlines()
    )
    nested = [base / kind / group for group in groups if group for kind in ("", controller)]
    return [*nested, base, base / controller]


def _cpuset(root: Path) -> frozenset[int]:
    for folder in _cgroup(root, "cpuset"):
        for name in ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"):
            if cpus := cpu_list(read_text_or_empty(folder / name)):
                return cpus
    return frozenset()


def _quota(root: Path) -> int | None:
    """Processors' worth of time that a container may use, as Kubernetes and ``docker --cpus`` limit it."""
    for folder in _cgroup(root, "cpu"):
        quota, _, period = read_text_or_empty(folder / "cpu.max").partition(" ")
        if not quota:
            quota, period = (
                read_text_or_empty(folder / "cpu.cfs_quota_us"),
                read_text_or_empty(folder / "cpu.cfs_period_us"),
            )
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


def _huge_pages(root: Path) -> bool:
    return "[never]" not in read_text_or_empty(root / "sys/kernel/mm/transparent_hugepage/enabled")


def _fabric(root: Path) -> bool:
    """InfiniBand, RoCE, Omni-Path and EFA are listed in one place, Slingshot in another."""
    return any(any((root / "sys/class" / kind).glob("*")) for kind in ("infiniband", "cxi"))
