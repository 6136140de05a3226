"""Made-up facts of a machine and an installation on which all is well, and changed ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from hvdtrain.doctor.checks import examine
from hvdtrain.doctor.facts import DoctorFacts
from hvdtrain.doctor.facts.installation import Installation, MpiFacts
from hvdtrain.doctor.facts.machine import GpuFacts, Interface, Limits, Machine, Network, RdmaPort
from hvdtrain.doctor.report import Finding
from hvdtrain.install.record import BuildRecord
from hvdtrain.install.versions import MpiBuild, TorchBuild
from hvdtrain.programs import Answer
from hvdtrain.runtime.environment import RankInfo
from hvdtrain.runtime.host import HostFacts, cpu_list
from hvdtrain.runtime.mpi import MpiLibrary
from tests.support.sysfs import DGX_GPUS, SOCKETS

OPEN_MPI = MpiLibrary("libmpi.so.40", "openmpi", Path("/venv/lib/libmpi.so.40"), 4)
MPICH = MpiLibrary("libmpi.so.12", "mpich", Path("/m/lib/libmpi.so.12"))
TORCH = {"version": "2.13.0+cpu", "cuda": None, "threads": 1, "gpus": []}
HOROVOD = {"version": "0.28.1", "mpi": True, "gloo": True, "nccl": False, "cuda": False}
ON_GPU = TORCH | {"version": "2.13.0", "cuda": "13.0", "gpus": ["H200", "H200"], "nccl": "2.29", "capability": [9, 0]}
DISK = {"folder": "/work", "type": "ext4", "free_bytes": 1 << 40}
LO, ETH0 = Interface("lo", "127.0.0.1", loopback=True), Interface("eth0", "10.0.0.1")
DOCKER0 = Interface("docker0", "172.17.0.1", virtual=True)
IB = (RdmaPort("mlx5_0", 1, True, "InfiniBand"),)
DGX = {"near": {gpu: cpu_list(SOCKETS[n // 4]) for n, gpu in enumerate(DGX_GPUS)}}
TWO_SOCKETS = {"domains": tuple(map(cpu_list, SOCKETS)), "allowed": cpu_list("0-15")}
GIB = 1 << 30
ALONE, HOSTS = RankInfo(host="node"), RankInfo("openmpi", 0, 4, 0, 2, "node")
GLOO, SRUN, TORCHRUN = (RankInfo(name, 0, 2, 0, 2, "node") for name in ("horovod-gloo", "slurm", "torchrun"))
CPU, BUILT_FOR = TorchBuild("2.13.0", "cpu"), MpiBuild("openmpi", "4.1.8")
RECORD = BuildRecord("0.28.1", torch=CPU, mpi=BUILT_FOR, prompt=True, fixed=True, quiet=True)

WELL = DoctorFacts(
    info=RankInfo("openmpi", 0, 2, 0, 2, "node"),
    environ={"OMPI_COMM_WORLD_RANK": "0"},
    installation=Installation(
        packages={"hvdtrain": "0.1.0", "numpy": "2.4", "transformers": "5.0"},
        torch=Answer(TORCH),
        horovod=Answer(HOROVOD),
        record=RECORD,
    ),
    mpi=MpiFacts(
        library=OPEN_MPI,
        library_version="Open MPI v4.1.8",
        file=Path("/venv/lib/libmpi.so.40"),
        programs=Path("/venv/bin"),
        mpirun="/venv/bin/mpirun",
        mpirun_version="mpirun (Open MPI) 4.1.8",
    ),
    machine=Machine(
        host=HostFacts(2, 1),
        system={"kernel": "Linux 6", "cpu": "some CPU", "memory": "8.0 GiB", "python": "3.11 (/venv/bin/python)"},
        processors=2,
        memory_bytes=8 * GIB,
        shm_bytes=4 * GIB,
        shm_free_bytes=4 * GIB,
    ),
    gpu=GpuFacts(),
    network=Network("node", ("10.0.0.1",), (LO, ETH0), "eth0"),
    run_dir=Path("runs"),
    storage=Answer(DISK),
)


def changed(facts: DoctorFacts = WELL, **changes: Any) -> DoctorFacts:
    """Facts with other values; of a topic a dict of those that differ."""
    new = {
        name: dataclasses.replace(getattr(facts, name), **value)
        if isinstance(value, dict) and name != "environ"
        else value
        for name, value in changes.items()
    }
    return dataclasses.replace(facts, **new)


def torch(values: dict[str, Any] = TORCH, **changes: Any) -> dict[str, Answer]:
    return {"torch": Answer(values | changes)}


def on_gpus(**changes: Any) -> dict[str, Answer]:
    return torch(ON_GPU, **changes)


def horovod(**changes: Any) -> dict[str, Answer]:
    return {"horovod": Answer(HOROVOD | changes)}


def horovod_says(error: str) -> dict[str, Answer]:
    return {"horovod": Answer(error=error)}


def record(**changes: Any) -> dict[str, BuildRecord]:
    return {"record": dataclasses.replace(RECORD, **changes)}


def limits(**changes: int) -> dict[str, Limits]:
    return {"limits": Limits(**changes)}


def disk(**changes: Any) -> dict[str, Any]:
    return {"values": DISK | changes}


def finding(name: str, facts: DoctorFacts) -> Finding:
    (found,) = [one for one in examine(facts) if one.name == name]
    return found
