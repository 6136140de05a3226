"""A good state is no problem, and a check that does not apply reports nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.doctor.checks import examine
from hvdtrain.doctor.facts.child import Answer
from hvdtrain.doctor.facts.installation import LinkedLibrary
from hvdtrain.doctor.facts.machine import Limits
from hvdtrain.doctor.facts.mpi import Mpi4py
from hvdtrain.doctor.facts.network import RdmaPort
from hvdtrain.errors import LaunchError
from hvdtrain.runtime.channel import VARIABLE as CHANNEL
from hvdtrain.runtime.environment import RankInfo
from hvdtrain.runtime.host import HostFacts, cpu_list
from hvdtrain.runtime.mpi import MpiLibrary
from tests.doctor.facts import (
    DISK,
    DOCKER0,
    ETH0,
    GIB,
    GLOO,
    HOROVOD,
    LO,
    MPICH,
    ON_GPU,
    WELL,
    changed,
    finding,
)
from tests.support.sysfs import DGX_GPUS, SOCKETS

GPUS = {"torch": Answer(ON_GPU)}
HOSTS = RankInfo("openmpi", 0, 4, 0, 2, "node")
ALONE = RankInfo(host="node")
TORCHRUN = RankInfo("torchrun", 0, 2, 0, 2, "node")
SRUN = RankInfo("slurm", 0, 2, 0, 2, "node")
FAR = ON_GPU | {"pci": [DGX_GPUS[0], DGX_GPUS[4]]}
DGX = {"near": {gpu: cpu_list(SOCKETS[n // 4]) for n, gpu in enumerate(DGX_GPUS)}}
TWO_SOCKETS = {"domains": tuple(map(cpu_list, SOCKETS)), "allowed": cpu_list("0-15")}
IB = (RdmaPort("mlx5_0", 1, True, "InfiniBand"),)
UNKNOWN = MpiLibrary("libmpi.so.99", "unknown")
NCCL = {**GPUS, "nccl": LinkedLibrary("libnccl.so.2", Path("/n/libnccl.so.2"))}
DRIVER = {"count": 2, "driver": "580.65", "driver_cuda": (13, 0)}
ON_NFS = {"answer": Answer(DISK | {"type": "nfs4"})}
RENDEZVOUS = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "1"}
OWN_STORE = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1/secret", "HF_TOKEN": "x"}
OMPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}
OWN = {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}
CACHED = {"library": MpiLibrary("libmpi.so.40", "openmpi"), "file": None}


def with_nccl(version: str) -> dict[str, Any]:
    assert WELL.installation.record is not None
    return {**NCCL, "record": dataclasses.replace(WELL.installation.record, nccl=version)}


@pytest.mark.parametrize(
    ("name", "said", "changes"),
    [
        ("libnccl", "/n/libnccl.so.2", {"installation": with_nccl("2.29")}),
        (
            "libnccl",
            "/loaded",
            {"installation": {"nccl": LinkedLibrary("x", None), "horovod": Answer({**HOROVOD, "libnccl": "/loaded"})}},
        ),
        ("libmpi", "/loaded", {"mpi": CACHED, "installation": {"horovod": Answer({**HOROVOD, "libmpi": "/loaded"})}}),
        ("libmpi", "4.1.5", {"mpi": {"library_version": "Open MPI v4.1.5"}}),
        ("mpirun", "MPICH", {"mpi": {"library": UNKNOWN, "mpirun_version": "MPICH 5.0.2"}}),
        ("mpi4py", "4.1.2 on Open MPI", {}),
        ("quota", "2 of 64", {"machine": {"host": HostFacts(2, 2, quota=True), "processors": 64}}),
        ("memory", "4.0 of 8.0 GiB", {"machine": {"memory_limit_bytes": 4 * GIB}}),
        ("memlock", "unlimited", {"network": {"rdma": IB}}),
        ("driver", "580.65, for CUDA 13.0", {"gpu": DRIVER, "installation": GPUS}),
        ("pinned_memory", "64 MiB", {"installation": GPUS}),
        ("half", "on the GPU", {"installation": GPUS}),
        ("half", "amx_bf16", {"machine": {"cpu_flags": frozenset({"amx_bf16", "fpu"})}}),
        ("half", "and fp16 as fp32", {}),
        ("gpudirect", "without GDRCopy", {"network": {"rdma": IB}, "installation": GPUS, "gpu": {"peer_memory": True}}),
        ("locality", "2 NUMA domain(s): cores 0-55,112-167; 56-111,168-223", {"machine": TWO_SOCKETS}),
        ("locality", f"near cores {SOCKETS[1]}: GPU {DGX_GPUS[4]}, ", {"gpu": DGX, "machine": TWO_SOCKETS}),
        ("locality", "", {"gpu": DGX, "machine": TWO_SOCKETS, "installation": {"torch": Answer(FAR)}, "info": GLOO}),
        ("rdma", "mlx5_0:1 InfiniBand, active", {"network": {"rdma": IB}}),
        ("host_name", "harmless on one host", {"network": {"addresses": ("127.0.1.1", "::1")}}),
        ("host_name", "10.0.0.1", {"network": {"addresses": ("127.0.1.1", "10.0.0.1")}, "info": HOSTS}),
        ("interfaces", "docker0", {"network": {"interfaces": (LO, ETH0, DOCKER0)}}),
        ("interfaces", "eth0 10.0.0.1 (default route)", {"info": HOSTS}),
        (
            "interfaces",
            "docker0",
            {"network": {"interfaces": (LO, ETH0, DOCKER0)}, "info": HOSTS, "environ": {"HOROVOD_GLOO_IFACE": "eth0"}},
        ),
        ("run_dir_shared", "nfs4", {"storage": ON_NFS, "info": HOSTS}),
        ("run_dir_speed", "500 MiB/s", {}),
        ("files", "unlimited", {}),
        (
            "processes",
            "50",
            {"machine": {"limits": Limits(processes=50), "is_root": True}, "environ": {"OMPI_ALLOW_RUN_AS_ROOT": "1"}},
        ),
        ("shm", "1.0 GiB free", {"machine": {"shm_free_bytes": GIB}}),
    ],
)
def test_it_is_well(name: str, said: str, changes: dict[str, Any]) -> None:
    found = finding(name, changed(**changes))
    assert (found.level, found.fix) == ("ok", "")
    assert said in f"{found.found} {found.why}"


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("horovod_build", {"installation": {"record": None}}),
        (
            "horovod_build",
            {
                "installation": {
                    "horovod": Answer(error="x"),
                    "record": dataclasses.replace(WELL.installation.record, quiet=False),
                }
            },
        ),  # type: ignore[type-var]
        ("distutils", {"installation": {"python": (3, 12)}}),
        ("distutils", {"installation": {"distutils": False}}),
        ("torch_load", {"installation": {"torch": Answer(ON_GPU | {"version": "2.10.0"})}}),
        ("libmpi", {"mpi": {"library": None}}),
        ("mpi4py", {"mpi": {"mpi4py": None}}),
        ("mpi4py", {"mpi": {"library": None, "mpi4py": Mpi4py(Answer(error="x"))}}),
        ("horovodrun", {"mpi": {"horovodrun": False}}),
        ("horovodrun", {"info": ALONE}),
        ("horovodrun", {"info": ALONE, "mpi": {"mpirun_version": "MPICH 5.0.2"}}),
        ("opal_prefix", {"mpi": {"prefix": Path("/venv")}}),
        ("opal_prefix", {"mpi": {"prefix": Path("/nowhere"), "library": MPICH}}),
        ("root", {"info": ALONE, "machine": {"is_root": True}, "mpi": {"mpirun_version": "MPICH 5.0.2"}}),
        ("root", {"machine": {"is_root": True}}),
        ("remote_shell", {"machine": {"remote_shell": False}}),
        ("remote_shell", {"info": ALONE, "machine": {"remote_shell": False}, "mpi": {"mpirun_version": "MPICH 5.0.2"}}),
        ("launcher_variables", {"info": GLOO, "environ": OMPI}),
        ("launcher_variables", {"info": GLOO, "environ": OWN}),
        ("launcher_variables", {"info": GLOO, "environ": {**OMPI, "OMPI_COMM_WORLD_SIZE": "4", CHANNEL: "3"}}),
        ("controller", {"environ": {"HOROVOD_CONTROLLER": "MPI"}}),
        ("controller", {"info": GLOO, "environ": {"HOROVOD_CONTROLLER": "gloo"}}),
        ("srun", {"info": SRUN, "environ": {"PMIX_RANK": "0"}}),
        ("srun", {"info": SRUN, "environ": {"PMI_RANK": "0"}, "mpi": {"library": MPICH}}),
        ("srun", {"info": SRUN, "mpi": {"refusal": LaunchError("no PMI")}}),
        ("srun", {"info": SRUN, "mpi": {"library": UNKNOWN}}),
        ("srun", {"info": dataclasses.replace(SRUN, size=1, local_size=1)}),
        ("secrets", {"info": GLOO, "environ": OWN_STORE}),
        ("secrets", {"info": GLOO, "environ": RENDEZVOUS}),
        ("secrets", {"info": HOSTS, "environ": {**RENDEZVOUS, "HF_TOKEN": "x"}}),
        ("rendezvous", {"info": GLOO, "environ": OWN_STORE}),
        ("gloo", {"info": GLOO, "installation": GPUS}),
        (
            "variables",
            {"environ": {"HOROVOD_FUSION_THRESHOLD": "0", "HOROVOD_AUTOTUNE": "0", "THP_MEM_ALLOC_ENABLE": "1"}},
        ),
        ("variables", {"environ": {"NCCL_P2P_DISABLE": "1", "CUDA_LAUNCH_BLOCKING": "1"}}),
        ("btl", {"environ": {"OMPI_MCA_btl": "^openib"}}),
        ("btl", {"environ": {"OMPI_MCA_btl": "self,vader,tcp"}}),
        ("btl", {"environ": {"OMPI_MCA_btl": "self,tcp"}, "mpi": {"library": MPICH}}),
        ("binding", {"info": ALONE}),
        ("locality", {"machine": {"domains": (frozenset({0, 1}),)}, "gpu": {"near": {DGX_GPUS[0]: frozenset()}}}),
        ("oversubscription", {"environ": {"OMP_NUM_THREADS": "1"}}),
        ("quota", {}),
        ("quota", {"machine": {"host": HostFacts(2, 2, quota=True)}}),
        ("memory", {"machine": {"memory_limit_bytes": 9 * GIB}}),
        ("memlock", {"machine": {"limits": Limits(locked_bytes=1)}}),
        ("pinned_memory", {}),
        ("driver", {"installation": GPUS}),
        ("driver", {"gpu": DRIVER}),
        ("half", {"installation": {"torch": Answer(error="x")}}),
        ("gpudirect", {"installation": GPUS}),
        ("gpudirect", {"network": {"rdma": IB}}),
        ("host_name", {"network": {"addresses": None}}),
        (
            "named_interfaces",
            {"environ": {"NCCL_SOCKET_IFNAME": "^docker0", "OMPI_MCA_btl_tcp_if_include": "10.0.0.0/8"}},
        ),
        ("named_interfaces", {"environ": {"NCCL_SOCKET_IFNAME": "eth", "HOROVOD_GLOO_IFACE": "eth0,lo"}}),
        ("rdma", {}),
        ("ucx", {"network": {"rdma": IB}, "mpi": {"ucx": True}}),
        ("ucx", {"network": {"rdma": IB}}),
        ("ucx", {"mpi": {"ucx": False}}),
        ("run_dir_shared", {}),
        ("run_dir_speed", {"storage": {"answer": Answer(error="x")}}),
        ("timeline", {"info": ALONE}),
        ("timeline", {"info": TORCHRUN}),
        ("controller", {"info": TORCHRUN, "environ": {"HOROVOD_CONTROLLER": "gloo"}}),
    ],
)
def test_it_is_not_spoken_of(name: str, changes: dict[str, Any]) -> None:
    assert name not in {one.name for one in examine(changed(**changes))}


@pytest.mark.parametrize(
    ("name", "level", "said", "changes"),
    [
        ("run_dir_speed", "warning", "10 MiB/s", {"storage": {"answer": Answer(DISK | {"mib_per_s": 10.0})}}),
        ("run_dir_speed", "warning", "900.0 ms", {"storage": {"answer": Answer(DISK | {"sync_ms": 900.0})}}),
        ("run_dir", "warning", "in memory", {"storage": {"answer": Answer(DISK | {"type": "tmpfs"})}}),
        ("run_dir", "broken", "read-only", {"storage": {"answer": Answer(DISK | {"problem": "read-only"})}}),
        ("shm", "warning", "no /dev/shm", {"machine": {"shm_bytes": None, "shm_free_bytes": None}}),
        ("shm", "warning", "falls back to TCP", {"machine": {"shm_free_bytes": 7 << 20}}),
        ("btl", "warning", "over TCP", {"mpi": {"site": {"OMPI_MCA_btl": ("^vader,sm", Path("/etc/x"))}}}),
        ("host_name", "warning", "does not resolve", {"network": {"addresses": ()}}),
        ("host_name", "broken", "does not resolve", {"network": {"addresses": ()}, "info": GLOO}),
        (
            "locality",
            "warning",
            "may use cores 0-15, none of them near GPU 0000:9d:00.0",
            {"gpu": DGX, "machine": TWO_SOCKETS, "installation": {"torch": Answer(FAR)}, "info": ALONE},
        ),
        ("binding", "warning", "its share is 4", {"machine": {"host": HostFacts(8, 1)}}),
        ("controller", "broken", "for mpi", {"environ": {"HOROVOD_CONTROLLER": "gloo"}}),
        ("secrets", "warning", "HF_TOKEN", {"info": GLOO, "environ": {**RENDEZVOUS, "HF_TOKEN": "x", "A": "y"}}),
        ("launcher_variables", "broken", "of 4", {"info": GLOO, "environ": {**OMPI, "OMPI_COMM_WORLD_SIZE": "4"}}),
        (
            "launcher_variables",
            "broken",
            "PMI_RANK=3 of 4",
            {"info": GLOO, "environ": {**OWN, "PMI_RANK": "3", "PMI_SIZE": "4"}},
        ),
        ("horovodrun", "warning", "not on PATH", {"info": ALONE, "mpi": {"horovodrun": False}}),
        ("opal_prefix", "broken", "/nowhere", {"mpi": {"prefix": Path("/nowhere")}}),
        ("variables", "warning", "NCCL_P2P_DISABLE", {"installation": GPUS, "environ": {"NCCL_P2P_DISABLE": "1"}}),
        ("named_interfaces", "broken", "eth", {"environ": {"NCCL_SOCKET_IFNAME": "=eth"}}),
    ],
)
def test_the_other_side_of_each_limit(name: str, level: str, said: str, changes: dict[str, Any]) -> None:
    found = finding(name, changed(**changes))
    assert found.level == level and said in f"{found.found} {found.why}" and found.fix


def test_the_finding_depends_on_the_free_shared_memory() -> None:
    some, little = (finding("shm", changed(machine={"shm_free_bytes": count})) for count in (100 << 20, 7 << 20))
    container = finding("shm", changed(machine={"shm_bytes": 64 << 20, "shm_free_bytes": 64 << 20}))
    assert "Open MPI" in little.why and "Open MPI" not in some.why
    assert "remove the files" in some.fix and "remove the files" not in container.fix
