"""Made-up facts of a machine and an installation on which all is well, and changed ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from hvdtrain.doctor.checks import examine
from hvdtrain.doctor.finding import Finding
from hvdtrain.doctor.gather import Gathered
from hvdtrain.doctor.gather.child import Answer
from hvdtrain.doctor.gather.installation import Installation
from hvdtrain.doctor.gather.machine import Machine
from hvdtrain.doctor.gather.mpi import MpiFacts
from hvdtrain.install.record import BuildRecord
from hvdtrain.install.versions import TorchBuild
from hvdtrain.runtime.environment import RankInfo
from hvdtrain.runtime.host import HostFacts
from hvdtrain.runtime.mpi import MpiLibrary

OPEN_MPI = MpiLibrary("libmpi.so.40", "openmpi", Path("/venv/lib/libmpi.so.40"), 4)
MPICH = MpiLibrary("libmpi.so.12", "mpich", Path("/m/lib/libmpi.so.12"))
TORCH = {"version": "2.13.0+cpu", "cuda": None, "threads": 1, "gpus": []}
HOROVOD = {"version": "0.28.1", "mpi": True, "gloo": True, "nccl": False, "cuda": False}
ON_GPU = TORCH | {"version": "2.13.0", "cuda": "13.0", "gpus": ["H200", "H200"]}
GLOO = RankInfo("horovod-gloo", 0, 2, 0, 2, "node")

WELL = Gathered(
    info=RankInfo("openmpi", 0, 2, 0, 2, "node"),
    choices=[],
    environ={"OMPI_COMM_WORLD_RANK": "0"},
    installation=Installation(
        packages={"hvdtrain": "0.1.0", "numpy": "2.4", "transformers": "5.0"},
        torch=Answer(TORCH),
        horovod=Answer(HOROVOD),
        record=BuildRecord("0.28.1", torch=TorchBuild("2.13.0", "cpu")),
    ),
    mpi=MpiFacts(
        library=OPEN_MPI,
        library_version="Open MPI v4.1.8",
        mpirun="/venv/bin/mpirun",
        mpirun_version="mpirun (Open MPI) 4.1.8",
    ),
    machine=Machine(
        host=HostFacts(2, 1),
        system={"kernel": "Linux 6", "cpu": "some CPU", "memory": "8.0 GiB", "python": "3.11 (/venv/bin/python)"},
    ),
)


def changed(facts: Gathered = WELL, **changes: Any) -> Gathered:
    """Facts with other values; of a topic a dict of those that differ."""
    new = {
        name: dataclasses.replace(getattr(facts, name), **value)
        if isinstance(value, dict) and name != "environ"
        else value
        for name, value in changes.items()
    }
    return dataclasses.replace(facts, **new)


def finding(name: str, facts: Gathered) -> Finding:
    """The one finding of a name."""
    (found,) = [one for one in examine(facts) if one.name == name]
    return found
