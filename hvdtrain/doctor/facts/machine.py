"""Facts about this machine: cores, memory, limits of a process, GPUs, network. Read from the system, without torch."""

from __future__ import annotations

import ipaddress
import os
import platform
import re
import resource
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from hvdtrain.files import read_text_or_empty
from hvdtrain.install.versions import has_remote_shell
from hvdtrain.programs import ask, run_program
from hvdtrain.runtime.host import HostFacts, cgroup_folders, cores_near, numa_domains, read_host
from hvdtrain.runtime.interfaces import is_virtual

UNLIMITED = resource.RLIM_INFINITY
_V1_NO_LIMIT = 1 << 60

_DRIVER = """
import ctypes, json
version = ctypes.c_int()
ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
print(json.dumps({"cuda": version.value}))
"""

_NAME_TIMEOUT_S = 5


@dataclass(frozen=True)
class Limits:
    """Limits of this process, or `UNLIMITED`: soft ones, but for ``files``, which each start raises to the hard one."""

    files: int = UNLIMITED
    processes: int = UNLIMITED
    locked_bytes: int = UNLIMITED


@dataclass(frozen=True)
class Machine:
    """The machine."""

    host: HostFacts
    system: Mapping[str, str]  # descriptions of kernel, cpu, memory and python
    domains: tuple[frozenset[int], ...] = ()  # cores of each NUMA domain that has any
    allowed: frozenset[int] = frozenset()  # cores that this process may use
    processors: int = 1  # hardware threads of the machine, including those that this process may not use
    cpu_flags: frozenset[str] = frozenset()  # features of the processor, as the kernel names them
    memory_bytes: int = 0
    memory_limit_bytes: int | None = None  # of the container or job; None if there is none
    shm_bytes: int | None = None  # size of /dev/shm; None if it does not exist
    shm_free_bytes: int | None = None
    huge_pages: str = "madvise"  # the kernel's setting: always, madvise or never; "" if it has none
    limits: Limits = field(default_factory=Limits)
    is_root: bool = False
    remote_shell: bool = True  # whether Open MPI's mpirun finds ssh or rsh


def machine(environ: Mapping[str, str], root: Path = Path("/")) -> Machine:
    """Gather the facts. ``root``: root folder of ``sys``, ``proc`` and ``dev``."""
    first_processor = read_text_or_empty(root / "proc/cpuinfo").partition("\n\n")[0]
    fields = (line.partition(":") for line in first_processor.splitlines())
    cpu = {name.strip(): value.strip() for name, _, value in fields}
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    shm = shutil.disk_usage(root / "dev/shm") if (root / "dev/shm").is_dir() else None
    pages = read_text_or_empty(root / "sys/kernel/mm/transparent_hugepage/enabled")  # such as: always [madvise] never
    return Machine(
        host=read_host(environ, root),
        system={
            "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
            "cpu": cpu.get("model name") or platform.machine(),
            "memory": f"{memory_bytes / 2**30:.1f} GiB",
            "python": f"{platform.python_version()} ({sys.executable})",
        },
        domains=tuple(numa_domains(root / "sys")),
        allowed=frozenset(os.sched_getaffinity(0)),
        processors=os.cpu_count() or 1,
        cpu_flags=frozenset((cpu.get("flags") or cpu.get("Features") or "").split()),
        memory_bytes=memory_bytes,
        memory_limit_bytes=_memory_limit(root),
        shm_bytes=shm.total if shm else None,
        shm_free_bytes=shm.free if shm else None,
        huge_pages=pages.partition("[")[2].partition("]")[0],
        limits=limits(),
        is_root=os.geteuid() == 0,
        remote_shell=has_remote_shell(environ),
    )


def _memory_limit(root: Path) -> int | None:
    """Return the lowest memory limit of the control groups around this process, of versions 1 and 2."""
    folders = {part for folder in cgroup_folders(root, "memory") for part in (folder, *folder.parents)}
    files = [folder / name for folder in folders for name in ("memory.max", "memory.limit_in_bytes")]
    numbers = [int(text) for text in map(read_text_or_empty, files) if text.strip().isdigit()]
    return min((number for number in numbers if number < _V1_NO_LIMIT), default=None)


def limits() -> Limits:
    """Return the limits of this process."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    processes, locked_bytes = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_NPROC, resource.RLIMIT_MEMLOCK))
    return Limits(files, processes, locked_bytes)


@dataclass(frozen=True)
class GpuFacts:
    """NVIDIA GPUs."""

    count: int = 0  # of GPUs on the PCI bus, or with a device file
    driver: str | None = None  # version of the kernel driver; None if it is not loaded
    driver_cuda: tuple[int, int] | None = None  # newest CUDA it supports, such as (12, 4); None without its library
    peer_memory: bool = False  # whether the kernel module that lets network cards access GPU memory is loaded
    gdrcopy: bool = False  # whether the kernel module of GDRCopy is loaded
    near: Mapping[str, frozenset[int]] = field(default_factory=dict)  # cores near each GPU, by its PCI address


def gpu_facts(root: Path = Path("/")) -> GpuFacts:
    """Gather the facts. ``root``: root folder of ``sys``, ``proc`` and ``dev``."""
    devices = sum(path.name[6:].isdigit() for path in (root / "dev").glob("nvidia*"))
    driver = driver_version(root)
    on_bus = [device for device in sorted((root / "sys/bus/pci/devices").glob("*")) if _is_gpu(device)]
    number = int(ask(_DRIVER, timeout_s=20).values.get("cuda", 0)) if devices or driver else 0
    modules = root / "sys/module"
    return GpuFacts(
        count=max(devices, len(on_bus)),
        driver=driver,
        driver_cuda=(number // 1000, number % 1000 // 10) if number else None,
        peer_memory=any((modules / name).exists() for name in ("nvidia_peermem", "nv_peer_mem")),
        gdrcopy=(modules / "gdrdrv").exists(),
        near={device.name: cores_near(device.name, root / "sys") for device in on_bus},
    )


def driver_version(root: Path = Path("/")) -> str | None:
    """Return the version of NVIDIA's kernel driver; None if it is not loaded."""
    text = read_text_or_empty(root / "proc/driver/nvidia/version")
    version = re.search(r"Kernel Module.*?\s(\d+\.\d[\d.]*)", text)
    return version[1] if version else None


def gpu_models(root: Path = Path("/")) -> tuple[str, ...]:
    """Return the model of each GPU, as the driver lists them."""
    files = sorted(root.glob("proc/driver/nvidia/gpus/*/information"))
    models = (re.search(r"^Model:[ \t]*(\S.*?)\s*$", read_text_or_empty(file), re.M) for file in files)
    return tuple(model[1] if model else "a GPU" for model in models)


def _is_gpu(device: Path) -> bool:
    """Tell whether a PCI device is a display or 3D controller of NVIDIA."""
    vendor, kind = (read_text_or_empty(device / name) for name in ("vendor", "class"))
    return vendor.strip() == "0x10de" and kind.startswith("0x03")


@dataclass(frozen=True)
class Interface:
    """A network interface."""

    name: str
    address: str = ""  # its first IPv4 address; "" if it has none
    network: str = ""  # network of that address, such as ``10.0.0.0/24``; "" without an address
    mtu: int = 0  # largest packet in bytes
    up: bool = True  # whether it is switched on and has a link
    loopback: bool = False  # whether it leads to this host only
    virtual: bool = False  # whether it leads to containers and virtual machines of this host only


@dataclass(frozen=True)
class RdmaPort:
    """A port of an RDMA card. ``layer`` is InfiniBand or Ethernet (RoCE)."""

    device: str
    port: int
    active: bool
    layer: str


@dataclass(frozen=True)
class Network:
    """The network of this host."""

    name: str = "localhost"
    addresses: tuple[str, ...] | None = ()  # that the name resolves to; None if there is no program to resolve it
    interfaces: tuple[Interface, ...] = ()
    route: str = ""  # interface of the default route; "" if there is none
    rdma: tuple[RdmaPort, ...] = ()  # ports of InfiniBand and RoCE cards
    verbs: bool = True  # whether programs can use these cards

    @property
    def outward(self) -> list[Interface]:
        """The interfaces that lead to other hosts."""
        return [one for one in self.interfaces if one.up and one.address and not (one.loopback or one.virtual)]


def network(root: Path = Path("/")) -> Network:
    """Gather the facts, of the system below `root`. Packets are sent only to resolve this host's name."""
    name = platform.node()
    return Network(
        name=name,
        addresses=_addresses(name),
        interfaces=tuple(interfaces(root)),
        route=_default_route(read_text_or_empty(root / "proc/net/route")),
        rdma=tuple(_rdma_port(folder) for folder in sorted((root / "sys/class/infiniband").glob("*/ports/*"))),
        verbs=any((root / "dev/infiniband").glob("uverbs*")),
    )


def interfaces(root: Path = Path("/")) -> Iterator[Interface]:
    """Yield all network interfaces of this host."""
    addresses = psutil.net_if_addrs()
    for name, state in psutil.net_if_stats().items():
        ipv4 = next((one for one in addresses.get(name, ()) if one.family == socket.AF_INET), None)
        yield Interface(
            name,
            address=ipv4.address if ipv4 else "",
            network=str(ipaddress.ip_network(f"{ipv4.address}/{ipv4.netmask}", strict=False)) if ipv4 else "",
            mtu=state.mtu,
            up=state.isup,
            loopback=ipaddress.ip_address(ipv4.address).is_loopback if ipv4 else name == "lo",
            virtual=is_virtual(name, root),
        )


def _addresses(name: str) -> tuple[str, ...] | None:
    """Resolve a name as other programs do. In a child process, because a dead name server blocks its caller."""
    getent = shutil.which("getent")
    if getent is None:
        return None
    try:
        text = run_program([getent, "ahosts", name], _NAME_TIMEOUT_S).out
    except OSError:
        return ()
    return tuple(dict.fromkeys(line.split()[0] for line in text.splitlines() if line.strip()))


def _default_route(table: str) -> str:
    """Return the interface of the default route with the lowest metric, from the kernel's table."""
    rows = [line.split() for line in table.splitlines()[1:]]
    defaults = [(int(row[6]), row[0]) for row in rows if len(row) > 7 and row[1] == row[7] == "00000000"]
    return min(defaults)[1] if defaults else ""


def _rdma_port(folder: Path) -> RdmaPort:
    state, layer = (read_text_or_empty(folder / name).strip() for name in ("state", "link_layer"))
    return RdmaPort(folder.parent.parent.name, int(folder.name), state.endswith("ACTIVE"), layer)
