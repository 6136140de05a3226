"""Which MPI Horovod loads, and which one would start the ranks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass

from hvdtrain.errors import LaunchError
from hvdtrain.runtime import mpi
from hvdtrain.runtime.environment import RankInfo
from hvdtrain.runtime.mpi import MpiLibrary


@dataclass(frozen=True)
class MpiFacts:
    """MPI, from all its sides.

    Attributes:
        library, library_version: the libmpi that Horovod loads.
        mpirun, mpirun_version: the mpirun on PATH.
        refusal: why the ranks that the launcher started cannot join.
    """

    library: MpiLibrary | None = None
    library_version: str | None = None
    mpirun: str | None = None
    mpirun_version: str | None = None
    refusal: LaunchError | None = None


def mpi_facts(info: RankInfo, environ: Mapping[str, str], pool: Executor) -> MpiFacts:
    """Find the MPIs and ask them for their versions."""
    horovod = mpi.horovod_library()
    library = mpi.mpi_library(horovod, environ)
    mpirun = shutil.which("mpirun", path=environ.get("PATH", os.defpath))
    library_says = pool.submit(mpi.library_version, library.path if library else None)
    mpirun_says = pool.submit(mpi.mpirun_version, mpirun)
    return MpiFacts(
        library=library,
        library_version=library_says.result(),
        mpirun=mpirun,
        mpirun_version=mpirun_says.result(),
        refusal=_refusal(info, environ),
    )


def _refusal(info: RankInfo, environ: Mapping[str, str]) -> LaunchError | None:
    try:
        mpi.check_launch(info, variables=environ)
    except LaunchError as error:
        return error
    return None
