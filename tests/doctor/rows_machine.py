"""What may be wrong with a machine: what, how it is provoked, the finding that names it, its level, its cure."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from hvdtrain.doctor.facts.child import Answer
from hvdtrain.doctor.facts.network import RdmaPort
from hvdtrain.runtime.environment import RankInfo
from hvdtrain.runtime.host import cpu_list
from tests.doctor.facts import DOCKER0, ETH0, GLOO, LO, ON_GPU, WELL
from tests.doctor.provoke import (
    LEFT_OVER,
    NOWHERE,
    ROOT,
    contained,
    fake,
    really,
)
from tests.support.sysfs import DGX_GPUS, SOCKETS

GPUS = {"torch": Answer(ON_GPU)}
HOSTS = RankInfo("openmpi", 0, 4, 0, 2, "node")
SECOND = RankInfo("openmpi", 1, 2, 1, 2, "node")
IB = (RdmaPort("mlx5_0", 1, True, "InfiniBand"),)

DGX = {"near": {gpu: cpu_list(SOCKETS[n // 4]) for n, gpu in enumerate(DGX_GPUS)}}
TWO_SOCKETS = {"domains": tuple(map(cpu_list, SOCKETS)), "allowed": cpu_list("0-15")}

ROWS: list[Any] = [
    (
        "cores far from the GPU",
        fake(
            installation={"torch": Answer(ON_GPU | {"pci": [*DGX_GPUS[3:5]]})},
            gpu=DGX,
            machine=TWO_SOCKETS,
            info=SECOND,
        ),
        "locality",
        "warning",
        "--cpuset-cpus=56-111,168-223",
    ),
    ("fp16 over Gloo on the CPU", fake(info=GLOO), "gloo", "warning", "mpirun"),
    (
        "a Timeline that was never switched off",
        really(environment=LEFT_OVER),
        "variables",
        "warning",
        "unset HOROVOD_TIMELINE",
    ),
    ("no response cache", really(environment=LEFT_OVER), "variables", "warning", "HOROVOD_CACHE_CAPACITY"),
    ("autotune", really(environment=LEFT_OVER), "variables", "warning", "HOROVOD_AUTOTUNE"),
    ("Horovod's own fusion", really(environment=LEFT_OVER), "variables", "warning", "HOROVOD_FUSION_THRESHOLD"),
    ("no huge pages, by a variable", really(environment=LEFT_OVER), "variables", "warning", "THP_MEM_ALLOC_ENABLE"),
    ("no huge pages, by the kernel", fake(machine={"huge_pages": "never"}), "huge_pages", "warning", "echo madvise"),
    ("no shared memory in Open MPI", really(environment=LEFT_OVER), "btl", "warning", "OMPI_MCA_btl=^openib"),
    (
        "GPUs kept from each other",
        fake(installation=GPUS, environ={"NCCL_P2P_DISABLE": "1", "CUDA_LAUNCH_BLOCKING": "1"}),
        "variables",
        "warning",
        "unset CUDA_LAUNCH_BLOCKING NCCL_P2P_DISABLE",
    ),
    (
        "exchanges that are reported as complete too early",
        fake(installation=GPUS, environ={"HOROVOD_ENABLE_ASYNC_COMPLETION": "1"}),
        "variables",
        "warning",
        "unset",
    ),
    ("bf16, which Horovod does not know", fake(), "half", "ok", ""),
    (
        "bf16 on a GPU that has none",
        fake(installation={"torch": Answer(ON_GPU | {"capability": [7, 0]})}),
        "half",
        "warning",
        "fp16",
    ),
    ("a container's /dev/shm of 64 MB", contained, "shm", "warning", "--shm-size"),
    (
        "/dev/shm full of what was left",
        fake(machine={"shm_free_bytes": 1 << 20}),
        "shm",
        "warning",
        "remove the files that killed jobs left",
    ),
    ("few open files", really(before=["prlimit", "--nofile=100:200"]), "files", "warning", "limits.conf"),
    (
        "few open files, and the right to more",
        fake(machine={"limits": dataclasses.replace(WELL.machine.limits, files=100, most_files=4096)}),
        "files",
        "warning",
        "ulimit -n 4096",
    ),
    (
        "few threads",
        fake(machine={"limits": dataclasses.replace(WELL.machine.limits, processes=50)}),
        "processes",
        "warning",
        "ulimit -u",
    ),
    (
        "little locked memory and InfiniBand",
        fake(network={"rdma": IB}, machine={"limits": dataclasses.replace(WELL.machine.limits, locked_bytes=65536)}),
        "memlock",
        "warning",
        "memlock=-1",
    ),
    (
        "memory cannot be pinned",
        fake(installation={"torch": Answer(ON_GPU | {"pinned": "CUDA error"})}),
        "pinned_memory",
        "warning",
        "ulimit -l",
    ),
    ("a container with little memory", fake(machine={"memory_limit_bytes": 1 << 29}), "memory", "warning", "--mem"),
    ("a host name that does not resolve", contained, "host_name", "warning", "/etc/hosts"),
    (
        "Debian's 127.0.1.1, several hosts",
        fake(info=HOSTS, network={"addresses": ("127.0.1.1",)}),
        "host_name",
        "warning",
        "10.0.0.1",
    ),
    (
        "docker's bridge, several hosts",
        fake(info=HOSTS, network={"interfaces": (LO, ETH0, DOCKER0)}),
        "interfaces",
        "warning",
        "if_exclude=lo,docker0",
    ),
    (
        "no network, several hosts",
        fake(info=HOSTS, network={"interfaces": (LO,)}),
        "interfaces",
        "warning",
        "ip -brief address",
    ),
    (
        "an interface that is not there",
        really(environment=LEFT_OVER),
        "named_interfaces",
        "broken",
        "unset NCCL_SOCKET_IFNAME",
    ),
    (
        "an interface that is not there, in a site's file",
        fake(mpi={"site": {"OMPI_MCA_btl_tcp_if_include": ("ib0,10.0.0.0/8", Path("/etc/openmpi-mca-params.conf"))}}),
        "named_interfaces",
        "warning",
        "eth0",
    ),
    (
        "InfiniBand without its devices",
        fake(network={"rdma": IB, "verbs": False}),
        "rdma",
        "warning",
        "--device /dev/infiniband",
    ),
    (
        "InfiniBand without a link",
        fake(network={"rdma": (dataclasses.replace(IB[0], active=False),)}),
        "rdma",
        "warning",
        "ibstat",
    ),
    (
        "InfiniBand, and an Open MPI without UCX",
        fake(network={"rdma": IB}, mpi={"ucx": False}),
        "ucx",
        "warning",
        "UCX",
    ),
    ("no GPUDirect", fake(network={"rdma": IB}, installation=GPUS), "gpudirect", "warning", "modprobe nvidia_peermem"),
    ("runs in memory", really("--run_dir", "/dev/shm/runs", without=ROOT), "run_dir", "warning", "--run_dir on a disk"),
    (
        "runs where nothing can be written",
        really("--run_dir", "/proc/runs", environment=NOWHERE),
        "run_dir",
        "broken",
        "another folder",
    ),
    (
        "little room",
        fake(storage={"answer": Answer({"folder": "/", "type": "ext4", "free_bytes": 1 << 20})}),
        "run_dir",
        "warning",
        "--checkpoint.keep",
    ),
    (
        "a file server that hangs",
        fake(storage={"answer": Answer(error="no answer in 15 s")}),
        "run_dir",
        "broken",
        "another file system",
    ),
    ("hosts that share no folder", fake(info=HOSTS), "run_dir_shared", "warning", "that all hosts mount"),
]
