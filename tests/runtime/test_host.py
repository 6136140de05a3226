"""What a host offers: read from the kernel's files, here made up."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hvdtrain.runtime import host
from hvdtrain.runtime.host import read_host


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
