"""Detect what this machine has to start ranks with, by asking programs for their versions."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hvdtrain.install import record
from hvdtrain.install.build_probe import output
from hvdtrain.install.mpirun import identify_mpi, own_mpirun, wheel_prefix
from hvdtrain.launch.spec import Mpi
from hvdtrain.runtime.mpi import horovod_library, mpi_library

PROGRAMS = ("srun", "jsrun")


@dataclass(frozen=True)
class Machine:
    """Programs of this machine that start ranks."""

    mpis: tuple[Mpi, ...] = ()  # MPIs with an mpirun: that of Horovod's library first, then those on PATH
    family: str | None = None  # of the MPI that Horovod uses: openmpi, mpich (Intel MPI too) or unknown; None: no MPI
    horovod: bool = True  # whether Horovod is installed
    programs: Mapping[str, str] = field(default_factory=dict)  # paths of those of `PROGRAMS` that are installed
    in_slurm: bool = False  # whether this process is inside an allocation
    slurm_mpi: tuple[str, ...] = ()  # the kinds that ``srun --mpi=list`` names

    def slurm_mpi_for(self, mpi: Mpi | None) -> str:
        """Return the ``--mpi`` with which srun connects the ranks of an MPI; "" where it cannot."""
        # Intel MPI would also need Slurm's PMI library (I_MPI_PMI_LIBRARY), with a path that differs by site.
        wanted = {"openmpi": "pmix", "mpich": "pmi2"}.get(mpi.flavour if mpi is not None else "")
        return next((kind for kind in sorted(self.slurm_mpi) if wanted and kind.startswith(wanted)), "")


def detect_machine(environ: Mapping[str, str]) -> Machine:
    """Detect MPIs, launchers and schedulers. Runs mpirun and srun for their versions, which takes a moment."""
    library = mpi_library(horovod_library(), environ)
    path = search_path(environ)
    programs = {name: found for name in PROGRAMS if (found := shutil.which(name, path=path))}
    mpiruns = [mpirun] if library and (mpirun := own_mpirun(library.path)) else []
    mpiruns += [Path(part) / "mpirun" for part in path.split(os.pathsep) if part]
    return Machine(
        mpis=tuple(_mpis(mpiruns, environ)),
        family=library.family if library else None,
        horovod=record.installed() is not None,
        programs=programs,
        in_slurm="SLURM_JOB_ID" in environ,
        slurm_mpi=_slurm_mpi(programs.get("srun"), environ),
    )


def search_path(environ: Mapping[str, str]) -> str:
    """Return PATH and, after it, the folder of this Python, as its environment may not be active."""
    return os.pathsep.join([environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])


def _mpis(mpiruns: list[Path], environ: Mapping[str, str]) -> Iterator[Mpi]:
    first = shutil.which("mpirun", path=environ.get("PATH", os.defpath))
    seen: set[Path] = set()
    for mpirun in mpiruns:
        build = None if mpirun.resolve() in seen else identify_mpi(mpirun, environ)
        seen.add(mpirun.resolve())
        if build is not None:
            name = "mpirun" if first and mpirun.samefile(first) else str(mpirun)
            prefix = wheel_prefix(mpirun.parent.parent)
            yield Mpi(build.flavour, build.version, name, str(prefix) if prefix else None)


def _slurm_mpi(srun: str | None, environ: Mapping[str, str]) -> tuple[str, ...]:
    if srun is None:
        return ()
    listed = output([srun, "--mpi=list"], environ)
    return tuple(re.findall(r"^(?:srun:)?\s*(pmix\w*|pmi2|none|cray\w*)\s*$", listed, re.MULTILINE))
