"""Facts about this host (cores, GPUs, huge pages), and pin a rank to the cores near its GPU, or to a NUMA domain.

Read from the system, without torch. Linux only. A rank only narrows the mask that its launcher or its control group has
set. Threads and processes that start later inherit it, and the kernel places memory on the domain of the core that
first writes to it, so loaders and pinned memory follow.

Ranks near the same cores share all of them. A share for each would leave cores idle whenever one rank's loaders have
more to do than another's, and its memory would be no nearer.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hvdtrain.errors import listed
from hvdtrain.files import read_text_or_empty
from hvdtrain.runtime.threads import thread_ids

_COLUMNS = 80
_MOST_HOSTS = 3


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
    lines = read_text_or_empty(root / "proc/self/cgroup").splitlines()
    groups = dict.fromkeys(line.split(":", 2)[2].strip("/") for line in lines)
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


@dataclass(frozen=True)
class Seat:
    """The cores that a rank may use, and those near its GPU; empty if unknown."""

    allowed: frozenset[int]
    near: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Binding:
    """The cores of a rank."""

    cpus: frozenset[int]  # that its threads and loader processes may use
    gpu: str = ""  # PCI address of its GPU; empty on CPUs
    kept: str = ""  # the problem for which it keeps its mask; empty if it is bound


def cores_near(pci_address: str, sys: Path) -> frozenset[int]:
    """Return the cores near a PCI device such as ``0000:1B:00.0``; empty if the kernel does not list them."""
    return cpu_list(read_text_or_empty(sys / "bus/pci/devices" / pci_address.lower() / "local_cpulist"))


def numa_domains(sys: Path) -> list[frozenset[int]]:
    """Return the cores of each NUMA domain, less domains without cores, such as the memory of a GH200's GPU."""
    nodes = [node for node in (sys / "devices/system/node").glob("node*") if node.name[4:].isdigit()]
    found = (cpu_list(read_text_or_empty(node / "cpulist")) for node in sorted(nodes, key=lambda n: int(n.name[4:])))
    return [cpus for cpus in found if cpus]


def bind_to_gpus(seats: Sequence[Seat], *, insist: bool) -> list[Binding]:
    """Choose the cores of the ranks of a host: those near their GPUs. Pure.

    A rank keeps its mask if it has no such core. Unless `insist`, also if it has less than half as many of them as its
    share of the mask, and as there are: loaders would wait for each other on the few cores of a job that got most of
    its cores elsewhere.
    """
    return [_bind_to_gpu(seat, sum(other.allowed == seat.allowed for other in seats), insist) for seat in seats]


def _bind_to_gpu(seat: Seat, sharers: int, insist: bool) -> Binding:
    cpus = seat.allowed & seat.near
    enough = 0 if insist else min(len(seat.near), len(seat.allowed) // sharers) / 2
    if not seat.near:
        return Binding(seat.allowed, kept="the kernel does not list the cores near their GPUs")
    if cpus and len(cpus) >= enough:
        return Binding(cpus)
    few = f"only {len(cpus)}" if cpus else "none"
    return Binding(seat.allowed, kept=f"they may use {few} of the cores near their GPUs ({cpu_ranges(seat.near)})")


def pin_process(cpus: frozenset[int]) -> None:
    """Pin this process to `cpus`: its threads, and its child processes such as a fork server of loaders.

    A thread that may use none of them keeps its mask, such as one that was bound elsewhere by a variable of a library.
    Threads of torch and Horovod that start later inherit the mask of the thread that starts them.
    """
    import psutil  # takes 30 ms

    _narrow(0, cpus)  # first: threads that it starts from now on need no further look
    me, seen = psutil.Process(), set[int]()
    while new := {task for one in (me, *me.children(recursive=True)) for task in thread_ids(one.pid)} - seen:
        for task in new:
            _narrow(task, cpus)
        seen |= new


def _narrow(thread: int, cpus: frozenset[int]) -> None:
    with suppress(OSError):  # it has ended
        if both := os.sched_getaffinity(thread) & cpus:
            os.sched_setaffinity(thread, both)


def binding_map(hosts: Sequence[str], bindings: Sequence[Binding]) -> list[dict[str, Any]]:
    """Return the ranks of each host by their cores, for the journal; `hosts` and `bindings` in rank order."""
    groups: dict[tuple[str, frozenset[int], str], list[int]] = {}
    for rank, (host, binding) in enumerate(zip(hosts, bindings, strict=True)):
        groups.setdefault((host, binding.cpus, binding.kept), []).append(rank)
    return [
        {
            "host": host,
            "ranks": cpu_ranges(ranks),
            "cores": cpu_ranges(cpus),
            "gpus": [bindings[rank].gpu for rank in ranks if bindings[rank].gpu],
            "kept": kept,
        }
        for (host, cpus, kept), ranks in groups.items()
    ]


def describe_map(groups: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of a `binding_map`: one for all hosts with the same cores for each local rank."""
    by_host: dict[str, list[Mapping[str, Any]]] = {}
    for group in groups:
        by_host.setdefault(group["host"], []).append(group)
    alike: dict[tuple[str, ...], list[str]] = {}
    for host, own in by_host.items():
        ranks = sorted(rank for group in own for rank in cpu_list(group["ranks"]))
        name = "rank" if len(by_host) == 1 else "local rank"
        parts = tuple(_describe(name, {ranks.index(rank) for rank in cpu_list(g["ranks"])}, g) for g in own)
        alike.setdefault(parts, []).append(host)
    for parts, hosts in alike.items():
        head = "binding: " if len(by_host) == 1 else f"binding on {listed(hosts, _MOST_HOSTS)}: "
        # commas within sets of cores are no places to break a line
        yield textwrap.fill(
            head + ", ".join(parts), _COLUMNS, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )


def _describe(name: str, numbers: set[int], group: Mapping[str, Any]) -> str:
    return f"{name}{'s' * (len(numbers) > 1)} {cpu_ranges(numbers)} on cores {group['cores']}"


def problems(groups: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the problems of a `binding_map`, and the ranks that have them."""
    ranks: dict[str, set[int]] = {}
    for group in groups:
        if group["kept"]:
            ranks.setdefault(group["kept"], set()).update(cpu_list(group["ranks"]))
    for why, numbers in ranks.items():
        yield f"ranks {cpu_ranges(numbers)} are not bound to cores: {why}; what to change: hvdtrain doctor"
