"""What is gathered: from the kernel's files, here made up, from folders, from libraries as a linker writes them."""

from __future__ import annotations

import fcntl
import socket
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hvdtrain.doctor.gather import gather
from hvdtrain.doctor.gather.gpu import gpu_facts
from hvdtrain.doctor.gather.installation import needed
from hvdtrain.doctor.gather.machine import machine
from hvdtrain.doctor.gather.mpi import mpi_build, mpi_facts
from hvdtrain.doctor.gather.network import RdmaPort, network
from hvdtrain.doctor.gather.storage import mounted, probe, storage
from hvdtrain.install.versions import MpiBuild
from hvdtrain.runtime.environment import RankInfo
from tests.runtime.libraries import horovod, open_mpi, write_library

GIB = 1 << 30


def files(root: Path, texts: dict[str, str]) -> Path:
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("limits", "found"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/pod/c1\n", "sys/fs/cgroup/pod/c1/memory.max": "max\n"}, None),
        ({"proc/self/cgroup": "0::/pod/c1\n", "sys/fs/cgroup/pod/c1/memory.max": f"{GIB}\n"}, GIB),
        (
            {
                "proc/self/cgroup": "0::/pod/c1\n",
                "sys/fs/cgroup/pod/c1/memory.max": f"{4 * GIB}\n",
                "sys/fs/cgroup/pod/memory.max": f"{2 * GIB}\n",
            },
            2 * GIB,
        ),
        ({"proc/self/cgroup": "4:memory:/job\n", "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{GIB}"}, GIB),
        (
            {"proc/self/cgroup": "4:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": str((1 << 63) - 4096)},
            None,
        ),
    ],
)
def test_the_lowest_limit_of_memory_counts(limits: dict[str, str], found: int | None, tmp_path: Path) -> None:
    assert machine({}, files(tmp_path, limits)).memory_limit_bytes == found


def test_the_machine_is_read(tmp_path: Path) -> None:
    root = files(
        tmp_path,
        {
            "proc/cpuinfo": "processor : 0\nmodel name : Some CPU\nflags : fpu amx_bf16\n\nprocessor : 1\nflags : x\n",
            "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
            "dev/shm/here": "",
        },
    )
    found = machine({}, root)
    assert found.system["cpu"] == "Some CPU" and "amx_bf16" in found.cpu_flags and "x" not in found.cpu_flags
    assert found.huge_pages == "never"
    assert found.shm_bytes is not None and found.shm_free_bytes is not None
    assert 0 < found.shm_free_bytes <= found.shm_bytes
    assert machine({}, tmp_path / "nothing").shm_bytes is None
    assert machine({}, tmp_path / "nothing").huge_pages == ""


def test_gpus_are_seen_without_torch(tmp_path: Path) -> None:
    version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (root@x)\n"
    root = files(
        tmp_path,
        {
            "dev/nvidia0": "",
            "dev/nvidia1": "",
            "dev/nvidiactl": "",
            "proc/driver/nvidia/version": version,
            "sys/bus/pci/devices/0/vendor": "0x10de\n",
            "sys/bus/pci/devices/0/class": "0x030200\n",
            "sys/bus/pci/devices/1/vendor": "0x10de\n",
            "sys/bus/pci/devices/1/class": "0x068000\n",
            "sys/bus/pci/devices/2/vendor": "0x8086\n",
            "sys/bus/pci/devices/2/class": "0x030000\n",
            "sys/module/nvidia_peermem/version": "580",
        },
    )
    found = gpu_facts(root)
    assert (found.devices, found.on_bus, found.driver) == (2, 1, "580.65.06")
    assert found.peer_memory and not found.gdrcopy
    nothing = gpu_facts(tmp_path / "nothing")
    assert (nothing.devices, nothing.on_bus, nothing.driver, nothing.driver_cuda) == (0, 0, None, None)


UP, DOWN, NO_LINK, LOOPBACK = 0x1043, 0x1002, 0x1003, 0x49
FLAGS = {"lo": LOOPBACK, "eth0": UP, "eth1": NO_LINK, "eth2": DOWN, "docker0": UP, "br9": UP}


def test_the_network_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(asking: object, what: int, name: bytes) -> bytes:
        known = name.rstrip(b"\0").decode()
        if what == 0x8913:
            return name[:16] + struct.pack("<H", FLAGS[known]) + bytes(100)
        if known == "eth2":
            raise OSError("no address")
        return name[:16] + struct.pack("<HH4B", 2, 0, 10, 0, 0, list(FLAGS).index(known)) + bytes(100)

    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(FLAGS, 1)))
    monkeypatch.setattr(fcntl, "ioctl", kernel)
    route = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU\n"
    route += "eth1 00000000 0100000A 0003 0 0 200 00000000 0\neth0 00000000 0100000A 0003 0 0 100 00000000 0\n"
    route += "eth2 0000000A 00000000 0001 0 0 0 00FFFFFF 0\n"
    root = files(
        tmp_path,
        {
            "sys/class/net/br9/bridge/x": "",
            "proc/net/route": route,
            "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
            "sys/class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand\n",
            "sys/class/infiniband/mlx5_1/ports/1/state": "1: DOWN\n",
            "sys/class/infiniband/mlx5_1/ports/1/link_layer": "Ethernet\n",
        },
    )
    found = network(root)
    there = {one.name: one for one in found.interfaces}
    assert found.route == "eth0"
    assert there["lo"].loopback and not there["eth0"].loopback
    assert [there[name].up for name in ("eth0", "eth1", "eth2")] == [True, False, False]
    assert [there[name].address for name in ("eth0", "eth2")] == ["10.0.0.1", ""]
    assert [name for name, one in there.items() if one.virtual] == ["docker0", "br9"]
    assert found.rdma == (RdmaPort("mlx5_0", 1, True, "InfiniBand"), RdmaPort("mlx5_1", 1, False, "Ethernet"))
    assert not found.verbs


def test_the_real_network_has_a_loopback_and_addresses() -> None:
    found = network()
    (lo,) = [one for one in found.interfaces if one.loopback]
    assert (lo.name, lo.address) == ("lo", "127.0.0.1")
    assert found.name == socket.gethostname()


MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / /home rw - nfs4 server:/home rw
31 30 0:41 / /home/with\\040space rw shared:2 master:3 - tmpfs tmpfs rw
32 22 0:42 / /home rw - lustre server:/new rw
"""


@pytest.mark.parametrize(
    ("folder", "kind"),
    [("/work", "ext4"), ("/homes", "ext4"), ("/home/me/runs", "lustre"), ("/home/with space/x", "tmpfs")],
)
def test_what_is_mounted_last_and_deepest_is_what_a_folder_is_on(folder: str, kind: str) -> None:
    assert mounted(Path(folder), MOUNTS) == kind


def test_a_folder_is_measured_and_nothing_stays_there(tmp_path: Path) -> None:
    found = probe(tmp_path / "not/yet/there", MOUNTS)
    assert found["folder"] == str(tmp_path) and found["type"] == "ext4"
    assert found["free_bytes"] > 0 and found["mib_per_s"] > 0 and found["sync_ms"] > 0
    assert not any(tmp_path.iterdir())


def test_a_folder_that_refuses_says_why() -> None:
    assert probe(Path("/proc/runs"), MOUNTS)["problem"]


def test_a_folder_is_asked_in_a_process_of_its_own(tmp_path: Path) -> None:
    found = storage(tmp_path)
    assert found.answer.error is None and found.answer.values["folder"] == str(tmp_path)


@pytest.mark.parametrize(
    ("text", "build"),
    [
        ("mpirun (Open MPI) 4.1.8", MpiBuild("openmpi", "4.1.8")),
        ("mpirun (Open MPI) 5.0.11rc1", MpiBuild("openmpi", "5.0.11")),
        ("Open MPI v4.1.8", MpiBuild("openmpi", "4.1.8")),
        ("MPICH 5.0.2", MpiBuild("mpich", "5.0.2")),
        ("MPICH Version:      5.0.2", MpiBuild("mpich", "5.0.2")),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.11 Build 2023", MpiBuild("intelmpi", "2021.11")),
        ("Intel(R) MPI Library 2021.11 for Linux* OS", MpiBuild("intelmpi", "2021.11")),
        ("mpirun of somebody 1.0", None),
        (None, None),
    ],
)
def test_what_programs_and_libraries_say_of_themselves(text: str | None, build: MpiBuild | None) -> None:
    assert mpi_build(text) == build


def facts_of(monkeypatch: pytest.MonkeyPatch, library: Path, environ: dict[str, str] | None = None):  # type: ignore[no-untyped-def]
    monkeypatch.setattr("hvdtrain.runtime.mpi.horovod_library", lambda: library)
    with ThreadPoolExecutor(8) as pool:
        return mpi_facts(RankInfo(), {"PATH": "/no/programs", **(environ or {})}, pool)


def test_folders_of_the_build_that_are_gone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = facts_of(monkeypatch, horovod(tmp_path, runpath="/gone/lib:/usr", soname="libmpi.so.12"))
    assert found.library is not None
    if found.library.path is None:  # this machine has no MPICH
        assert found.gone == (Path("/gone/lib"),)
    assert found.mpirun is None and not found.horovodrun


def test_an_mpi_is_seen_from_all_its_sides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    libmpi = open_mpi(tmp_path / "real", 4)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "link/bin").mkdir()
    (tmp_path / "link/bin/mpirun").touch()
    library = horovod(tmp_path, runpath=str(tmp_path / "link/lib"))
    found = facts_of(monkeypatch, library, {"OPAL_PREFIX": str(tmp_path / "link")})
    assert found.file == libmpi and found.prefix == tmp_path / "real"
    assert found.programs == tmp_path / "real/bin"
    assert found.ucx is False and found.gone == ()
    (libmpi.parent / "openmpi").mkdir()
    (libmpi.parent / "openmpi/mca_pml_ucx.so").touch()
    assert facts_of(monkeypatch, library).ucx is True


def test_ucx_within_a_library_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_library(tmp_path / "lib/libmpi.so.40", ["libopen-pal.so.80"])
    write_library(tmp_path / "lib/libopen-pal.so.80.0.5", ["libucp.so.0"])
    assert facts_of(monkeypatch, horovod(tmp_path, runpath=str(tmp_path / "lib"))).ucx is True


def test_an_nccl_that_is_gone(tmp_path: Path) -> None:
    write_library(tmp_path / "here/libnccl.so.2", [])
    there = write_library(tmp_path / "a.so", ["libc.so.6", "libnccl.so.2"], runpath=f"{tmp_path}/here")
    gone = write_library(tmp_path / "b.so", ["libnccl.so.2"], runpath=f"{tmp_path}/gone")
    found, missing = needed(there, "libnccl.so", {}), needed(gone, "libnccl.so", {})
    assert found is not None and found.path == tmp_path / "here/libnccl.so.2"
    assert missing is not None and missing.folders == (tmp_path / "gone",)
    if missing.path:  # this machine has one of its own
        assert not missing.path.is_relative_to(tmp_path)
    assert needed(write_library(tmp_path / "c.so", ["libc.so.6"]), "libnccl.so", {}) is None
    assert needed(None, "libnccl.so", {}) is None


def test_a_rank_of_another_mpi_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    libmpi = write_library(tmp_path / "lib/libmpi.so.12", ["libc.so.6"])
    monkeypatch.setattr(
        "hvdtrain.runtime.mpi.horovod_library", lambda: horovod(tmp_path, "libmpi.so.12", runpath=str(libmpi.parent))
    )
    with ThreadPoolExecutor(8) as pool:
        found = mpi_facts(RankInfo("openmpi", 0, 2, 0, 2), {"PATH": "/no/programs"}, pool)
    assert found.refusal is not None and "build-horovod" in str(found.refusal.next_step)


def test_what_we_set_ourselves_is_not_taken_for_somebodys(tmp_path: Path) -> None:
    found = gather(RankInfo(), [], {"PATH": "/bin", "A": "1", "B": "2", "HVDTRAIN_SET": '{"A": "1"}'}, tmp_path)
    assert found.environ == {"PATH": "/bin", "B": "2"}
    assert found.installation.python == sys.version_info[:2]
    assert found.installation.torch.values["version"]
