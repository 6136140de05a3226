"""Gathering facts from the kernel's files (made up here), from folders, and from libraries as a linker writes them."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from hvdtrain.doctor.facts import gather
from hvdtrain.doctor.facts.machine import RdmaPort, gpu_facts, machine, network
from hvdtrain.doctor.facts.storage import file_system_type, probe, storage
from hvdtrain.programs import Answer
from hvdtrain.runtime.environment import RankInfo
from tests.support.launch import TIMEOUT_S
from tests.support.sysfs import dgx_h100, gh200, two_sockets

GIB = 1 << 30
POD = {"proc/self/cgroup": "0::/pod/c1\n"}


def files(root: Path, texts: dict[str, str]) -> Path:
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("limits", "found"),
    [
        ({}, None),
        ({**POD, "pod/c1/memory.max": "max\n"}, None),
        ({**POD, "pod/c1/memory.max": f"{GIB}\n"}, GIB),
        ({**POD, "pod/c1/memory.max": f"{4 * GIB}", "pod/memory.max": f"{2 * GIB}"}, 2 * GIB),
        ({"proc/self/cgroup": "4:memory:/job\n", "memory/job/memory.limit_in_bytes": f"{GIB}"}, GIB),
        ({"proc/self/cgroup": "4:memory:/\n", "memory/memory.limit_in_bytes": str((1 << 63) - 4096)}, None),
    ],
)
def test_the_lowest_limit_of_memory_counts(limits: dict[str, str], found: int | None, tmp_path: Path) -> None:
    texts = {name if name.startswith("proc") else f"sys/fs/cgroup/{name}": text for name, text in limits.items()}
    assert machine({}, files(tmp_path, texts)).memory_limit_bytes == found


def test_the_machine_is_read(tmp_path: Path) -> None:
    cpus = "processor : 0\nmodel name : Some CPU\nflags : fpu amx_bf16\n\nprocessor : 1\nflags : x\n"
    huge = {"sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n"}
    found = machine({}, files(tmp_path, {"proc/cpuinfo": cpus, "dev/shm/here": "", **huge}))
    assert found.system["cpu"] == "Some CPU" and "amx_bf16" in found.cpu_flags and "x" not in found.cpu_flags
    assert found.huge_pages == "never"
    assert found.shm_bytes is not None and found.shm_free_bytes is not None
    assert 0 < found.shm_free_bytes <= found.shm_bytes
    nothing = machine({}, tmp_path / "nothing")
    assert (nothing.shm_bytes, nothing.huge_pages) == (None, "")


def test_gpus_are_found_without_torch(tmp_path: Path) -> None:
    version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (root@x)\n"
    texts = {"proc/driver/nvidia/version": version, "sys/module/nvidia_peermem/version": "580"}
    texts |= dict.fromkeys(("dev/nvidia0", "dev/nvidia1", "dev/nvidiactl"), "")
    for number, (vendor, kind) in enumerate((("0x10de", "0x030200"), ("0x10de", "0x068000"), ("0x8086", "0x030000"))):
        device = f"sys/bus/pci/devices/{number}"
        texts |= {f"{device}/vendor": f"{vendor}\n", f"{device}/class": f"{kind}\n"}
    found = gpu_facts(files(tmp_path, texts))
    assert (found.count, found.driver) == (2, "580.65.06")
    assert found.peer_memory and not found.gdrcopy
    shutil.rmtree(tmp_path / "dev")
    assert gpu_facts(tmp_path).count == 1, "on the bus"
    nothing = gpu_facts(tmp_path / "nothing")
    assert (nothing.count, nothing.driver, nothing.driver_cuda) == (0, None, None)


@pytest.mark.parametrize(("make", "domains", "gpus"), [(dgx_h100, 2, 8), (two_sockets, 4, 0), (gh200, 1, 1)])
def test_domains_and_the_cores_near_gpus_are_found(
    make: Callable[[Path], Path], domains: int, gpus: int, tmp_path: Path
) -> None:
    found, near = machine({}, make(tmp_path)), gpu_facts(tmp_path).near
    assert (len(found.domains), len(near)) == (domains, gpus)
    assert found.allowed == os.sched_getaffinity(0)
    assert set(near.values()) == (set(found.domains) if gpus else set())


def state(up: bool = True) -> SimpleNamespace:
    return SimpleNamespace(isup=up, mtu=1500)


def test_the_network_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = {"lo": state(), "eth0": state(), "eth1": state(up=False), "eth2": state(up=False)}
    states |= {"docker0": state(), "br9": state()}
    addresses = {"lo": "127.0.0.1", "eth0": "10.0.0.1", "eth1": "10.0.0.2", "docker0": "10.0.0.4", "br9": "10.0.0.5"}
    packet = SimpleNamespace(family=socket.AF_PACKET, address="00:00:00:00:00:01", netmask=None)
    ipv4 = {
        name: [packet, SimpleNamespace(family=socket.AF_INET, address=address, netmask="255.255.255.0")]
        for name, address in addresses.items()
    }
    monkeypatch.setattr(psutil, "net_if_stats", lambda: states)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {**ipv4, "eth2": [packet]})
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
    assert [there[name].network for name in ("eth0", "eth2")] == ["10.0.0.0/24", ""]
    assert [name for name, one in there.items() if one.virtual] == ["docker0", "br9"]
    assert found.rdma == (RdmaPort("mlx5_0", 1, True, "InfiniBand"), RdmaPort("mlx5_1", 1, False, "Ethernet"))
    assert not found.verbs


MOUNTS = """\
/dev/sda1 / ext4 rw,relatime 0 0
server:/home /home nfs4 rw 0 0
tmpfs /home/with\\040space tmpfs rw 0 0
server:/new /home lustre rw 0 0
"""


@pytest.mark.parametrize(
    ("folder", "kind"),
    [("/work", "ext4"), ("/homes", "ext4"), ("/home/me/runs", "lustre"), ("/home/with space/x", "tmpfs")],
)
def test_the_file_system_of_a_folder_is_the_deepest_and_latest_mount(
    folder: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psutil.PROCFS_PATH", str(tmp_path))
    (tmp_path / "self").mkdir()
    (tmp_path / "self/mounts").write_text(MOUNTS)
    assert file_system_type(Path(folder)) == kind


def test_a_folder_is_checked_and_nothing_stays_there(tmp_path: Path) -> None:
    found = probe(tmp_path / "not/yet/there")
    assert found["folder"] == str(tmp_path) and found["type"] == file_system_type(tmp_path) != "unknown"
    assert found["free_bytes"] > 0 and "problem" not in found
    assert not any(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_reports_why() -> None:
    assert probe(Path("/proc/runs"))["problem"]


def test_a_folder_is_checked_in_a_separate_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(storage.__globals__, "_TIMEOUT_S", TIMEOUT_S)
    found = storage(tmp_path)
    assert found.error is None and found.values["folder"] == str(tmp_path)


def test_our_own_settings_are_not_attributed_to_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["hvdtrain.doctor.facts.installation"], "ask", lambda *_: Answer(error="not asked"))
    found = gather(RankInfo(), {"PATH": "/bin", "A": "1", "B": "2", "HVDTRAIN_SET": '{"A": "1"}'}, tmp_path)
    assert found.environ == {"PATH": "/bin", "B": "2"}
    assert found.installation.python == sys.version_info[:2] and found.installation.torch.error == "not asked"
