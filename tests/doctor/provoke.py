"""Ways to make an installation or a machine worse, for real or by facts that are made up."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvdtrain.doctor.checks import examine
from hvdtrain.doctor.facts import DoctorFacts
from hvdtrain.doctor.facts.child import Answer
from tests.doctor.facts import changed
from tests.support.doctor import Findings, as_in_a_container, look, on_path, program

BUILD = "hvdtrain build-horovod"
Provoke = Callable[[Path], Findings]


@dataclasses.dataclass(frozen=True)
class MadeUp:
    """Facts of a machine that is well, but for some."""

    changes: dict[str, Any]

    def __call__(self, folder: Path) -> Findings:
        """What doctor says of them."""
        return told(changed(**self.changes))


def fake(**changes: Any) -> Provoke:
    return MadeUp(changes)


def told(facts: DoctorFacts) -> Findings:
    return {finding.name: finding.as_data() for finding in examine(facts)}


def really(*options: str, **how: Any) -> Provoke:
    return lambda folder: look(*options, **how)


def with_mpirun(says: str) -> Provoke:
    made: list[dict[str, str]] = []

    def provoke(folder: Path) -> Findings:
        made[:] = made or [on_path(program(folder, "mpirun", says).parent)]
        return look(environment=made[0])

    return provoke


def horovod_says(error: str) -> Provoke:
    return fake(installation={"horovod": Answer(error=error)})


def with_horovod(make: Callable[[Path, str], dict[str, str]], what: str) -> Provoke:
    return lambda folder: look(environment=make(folder, what))


def contained(folder: Path) -> Findings:
    return look(before=as_in_a_container("64m", "nobody-knows-me"))


LEFT_OVER = {
    "HOROVOD_TIMELINE": "/tmp/timeline.json",
    "HOROVOD_AUTOTUNE": "1",
    "HOROVOD_CACHE_CAPACITY": "0",
    "HOROVOD_FUSION_THRESHOLD": "67108864",
    "HOROVOD_LOG_LEVEL": "trace",
    "THP_MEM_ALLOC_ENABLE": "0",
    "OMPI_MCA_btl": "self,tcp",
    "NCCL_SOCKET_IFNAME": "=ib7",
    "OMP_NUM_THREADS": "4096",
    "CUDA_LAUNCH_BLOCKING": "1",
}
NOWHERE = {"OPAL_PREFIX": "/nowhere", "MPI4PY_LIBMPI": "/nowhere/libmpi.so"}
ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
