"""What a host offers, read from the kernel's files, here made up; which interfaces lead to other hosts."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from hvdtrain.runtime import host, interfaces
from hvdtrain.runtime.host import read_host
from hvdtrain.runtime.interfaces import nccl_interfaces, networks, shared_fabric


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A machine of 8 processors, whose launcher and rank may run on some of them."""

    def make(own: set[int], launcher: set[int], files: dict[str, str] | None = None) -> Path:
        monkeypatch.setattr(os, "cpu_count", lambda: 8)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: launcher if pid else own)
        for name, text in (files or {}).items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return tmp_path

    return make


EIGHT = set(range(8))


SIBLINGS = {f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list": f"{n % 4},{n % 4 + 4}" for n in EIGHT}
NO_LIMIT = {"sys/fs/cgroup/cpu.max": "max 100000\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1"}


@pytest.mark.parametrize(
    ("own", "launcher", "files", "cores", "quota"),
    [
        (EIGHT, EIGHT, {}, (8, 8), False),
        ({2}, EIGHT, {}, (8, 1), False),  # the launcher bound us to a part
        ({0, 1}, {0, 1}, {}, (2, 2), False),  # the whole job is bound to a part
        (EIGHT, EIGHT, SIBLINGS, (4, 4), False),  # hardware threads of one core are one
        ({1, 5}, EIGHT, SIBLINGS, (4, 1), False),
        (EIGHT, EIGHT, NO_LIMIT, (8, 8), False),
        (EIGHT, EIGHT, {"sys/fs/cgroup/cpu.max": "800000 100000\n"}, (8, 8), True),  # it takes no core away
    ],
)
def test_cores(machine, own, launcher, files, cores: tuple[int, int], quota: bool) -> None:
    found = read_host({}, machine(own, launcher, files))
    assert (found.cores, found.own_cores, found.quota) == (*cores, quota)


@pytest.mark.parametrize(
    "files",
    [
        {"sys/fs/cgroup/cpu.max": "350000 100000\n"},
        {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"},
        {"proc/self/cgroup": "0::/pod/c1\n", "sys/fs/cgroup/pod/c1/cpu.max": "300000 100000"},
        {"sys/fs/cgroup/cpuset.cpus.effective": "0-1,5"},
        {"proc/self/cgroup": "3:cpuset:/job\n", "sys/fs/cgroup/cpuset/job/cpuset.cpus": "1-3"},
    ],
)
def test_a_containers_limit_counts(machine, files: dict[str, str]) -> None:
    assert read_host({}, machine(EIGHT, EIGHT, files)).cores == 3


@pytest.mark.parametrize(
    ("file", "text", "huge_pages", "fabric"),
    [
        ("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never", True, False),
        ("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]", False, False),
        ("sys/class/net/eth0", "", True, False),
        ("sys/class/infiniband/mlx5_0", "", True, True),
        ("sys/class/cxi/cxi0", "", True, True),
    ],
)
def test_huge_pages_and_a_fabric(machine, file: str, text: str, huge_pages: bool, fabric: bool) -> None:
    found = read_host({}, machine(EIGHT, EIGHT, {file: text}))
    assert (found.huge_pages, found.fabric) == (huge_pages, fabric)


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 2), ("0,1", 2), ("1", 1), ("", 0), ("-1", 0), ("0,1,2,3", 2), ("GPU-1f", 1)]
)
def test_gpus_are_those_that_torch_may_use(
    machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int
) -> None:
    root = machine(EIGHT, EIGHT, {"dev/nvidia0": "", "dev/nvidia1": "", "dev/nvidiactl": "", "dev/nvidia-uvm": ""})
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    torch = tmp_path / "torch"
    (torch / "lib").mkdir(parents=True)
    (torch / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(host.find_spec.__globals__["sys"].modules, "torch", raising=False)
    assert read_host(environ, root).gpus == 0  # torch without CUDA
    (torch / "lib/libtorch_cuda.so").touch()
    assert read_host(environ, root).gpus == count


ADDRESSES = {
    "lo": "127.0.0.1/8",
    "virbr0": "192.168.122.1/24",
    "eth0": "10.0.0.5/24",
    "docker0": "172.17.0.1/16",
    "ib1": "10.2.0.5/16",
    "ib0": "10.1.0.5/16",
    "usb0": "169.254.3.1/16",
    "ibmgmt": "",
}
HOST = {"10.1.0.0/16": "ib0", "10.0.0.0/24": "eth0"}


def have(monkeypatch: pytest.MonkeyPatch, down: str = "", **addresses: str) -> None:
    found = {
        name: [SimpleNamespace(family=socket.AF_INET, address=text.split("/")[0], netmask=text.split("/")[1])]
        for name, text in addresses.items()
        if text
    }
    state = {name: SimpleNamespace(isup=name != down) for name in addresses}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: state)
    monkeypatch.setattr(interfaces, "is_virtual", lambda name: name.startswith(("docker", "virbr")))


def test_no_virtual_interface_leads_to_other_hosts_and_a_fabric_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, **ADDRESSES)
    assert list(networks().values()) == ["ib1", "ib0", "eth0"]
    assert nccl_interfaces() == "=ib1,ib0"
    have(monkeypatch, "ib1", **ADDRESSES)
    assert list(networks().values()) == ["ib0", "eth0"]
    # NCCL is left alone where it chooses right, as on one host without a network.
    have(monkeypatch, lo="127.0.0.1/8", eth0="10.0.0.5/24")
    assert nccl_interfaces() == ""
    have(monkeypatch, eth0="10.0.0.5/24", virbr0="192.168.122.1/24")
    assert nccl_interfaces() == "=eth0"
    have(monkeypatch, lo="127.0.0.1/8", docker0="172.17.0.1/16")
    assert nccl_interfaces() == ""


@pytest.mark.parametrize(
    ("other", "shared"),
    [
        ({"10.0.0.0/24": "eth1", "10.1.0.0/16": "ibs2"}, "10.1.0.0/16"),
        ({"10.1.0.0/16": "eth0"}, ""),
        ({"10.7.0.0/16": "ib0", "10.0.0.0/24": "eth0"}, ""),
        ({}, ""),
    ],
)
def test_a_fabric_is_used_where_all_hosts_are_on_it(other: dict[str, str], shared: str) -> None:
    assert shared_fabric([HOST, other]) == shared_fabric([HOST, HOST, other]) == shared
    assert shared_fabric([]) == ""
