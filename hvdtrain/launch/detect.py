"""Detect what this machine has to start ranks with, by asking programs for their versions."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import LaunchError
from hvdtrain.install import record
from hvdtrain.install.versions import MPI_NAMES, identify_mpi, own_mpirun, wheel_prefix
from hvdtrain.launch.spec import APPTAINER, PYXIS, SINGULARITY, Mpi
from hvdtrain.programs import output
from hvdtrain.runtime.mpi import horovod_library, mpi_library

NO_PMI = "none"


@dataclass(frozen=True)
class Machine:
    """Programs of this machine that start ranks."""

    mpis: tuple[Mpi, ...] = ()  # MPIs with an mpirun: that of Horovod's library first, then those on PATH
    family: str | None = None  # of the MPI that Horovod uses: openmpi, mpich (Intel MPI too) or unknown; None: no MPI
    horovod: bool = True  # whether Horovod is installed
    srun: bool = False  # whether it is installed
    in_slurm: bool = False  # whether this process is inside an allocation
    slurm_mpi: tuple[str, ...] = ()  # the kinds that ``srun --mpi=list`` names
    srun_mpi: Mpi | None = None  # the MPI that Horovod was built with, which may have no mpirun, only srun
    cray: bool = False  # whether Horovod uses Cray's MPICH
    intel_pmi: bool = False  # whether I_MPI_PMI_LIBRARY names Slurm's PMI library, with a path that differs by site
    pmi: str = ""  # the kind that the user requested; "" for the one that fits

    def slurm_mpi_for(self, mpi: Mpi | None) -> str:
        """Return the ``--mpi`` with which srun connects the ranks of an MPI; "" where it cannot.

        By https://slurm.schedmd.com/mpi_guide.html. Cray's MPICH uses Cray's PMI where srun has it.
        """
        if self.pmi and mpi is not None:
            return "" if self.pmi == NO_PMI else self.pmi
        wanted = {"openmpi": "pmix", "mpich": "pmi2", "intelmpi": "pmi2" if self.intel_pmi else ""}
        first = ("cray",) if self.cray and mpi is not None and mpi.flavour == "mpich" else ()
        names = (*first, wanted.get(mpi.flavour, "") if mpi is not None else "")
        fitting = (kind for name in names if name for kind in sorted(self.slurm_mpi) if kind.startswith(name))
        return next(fitting, "")

    @property
    def own_mpi(self) -> Mpi | None:
        """The MPI that starts ranks which Horovod can join."""
        return next((mpi for mpi in self.mpis if _family(mpi) == self.family), None)

    @property
    def mpi_for_image(self) -> Mpi | None:
        """The MPI for ranks in containers on a machine without Horovod; None if it has Horovod or no MPI."""
        return next(iter(self.mpis), None) if not self.horovod else None

    def mpi_named(self, flavour: str, in_image: bool) -> Mpi:
        """Return the MPI of this flavour. Errors: LaunchError if there is none, or Horovod uses another."""
        name = MPI_NAMES[flavour]
        found = next((mpi for mpi in self.mpis if mpi.flavour == flavour), None)
        if found is None:
            raise LaunchError(
                f"--to {flavour} needs mpirun of {name}.",
                expected=f"mpirun of {name} on PATH",
                found=", ".join(f"{mpi} ({mpi.mpirun})" for mpi in self.mpis) or "no mpirun",
                next_step="load the module of that MPI, or omit --to: hvdtrain launch chooses what fits this machine",
            )
        if self.horovod and not in_image and self.family not in (_family(found), "unknown"):
            used = {None: "no MPI", "openmpi": "Open MPI"}.get(self.family, "MPICH or Intel MPI")
            raise LaunchError(
                f"Horovod uses another MPI than {found}: ranks that it starts cannot find each other.",
                expected=f"a Horovod built for {name}",
                found=f"one built for {used}",
                next_step=f"{record.BUILD_COMMAND}, with {found.mpirun}'s mpicxx first on PATH; or omit --to",
            )
        return found


def needs_in_image(mpi: Mpi) -> str:
    """Return why an MPI is chosen for ranks in containers."""
    return f"there is no Horovod here, and that of the image must be built for {MPI_NAMES[mpi.flavour]}"


def _family(mpi: Mpi) -> str:
    """Return the family of an MPI: MPICH and Intel MPI share one binary interface."""
    return "openmpi" if mpi.flavour == "openmpi" else "mpich"


def detect_machine(environ: Mapping[str, str]) -> Machine:
    """Detect MPIs, launchers and schedulers. Runs mpirun and srun for their versions, which takes a moment."""
    library = mpi_library(horovod_library(), environ)
    path = search_path(environ)
    srun = shutil.which("srun", path=path)
    mpiruns = [mpirun] if library and (mpirun := own_mpirun(library.path)) else []
    mpiruns += [Path(part) / "mpirun" for part in path.split(os.pathsep) if part]
    listed = output([srun, "--mpi=list"], environ) if srun else ""
    built = record.installed()
    mpi = built.mpi if built is not None and library is not None else None
    return Machine(
        mpis=tuple(_mpis(mpiruns, environ)),
        family=library.family if library else None,
        horovod=built is not None,
        srun=srun is not None,
        in_slurm="SLURM_JOB_ID" in environ,
        slurm_mpi=tuple(re.findall(r"^(?:srun:)?\s*(pmix\w*|pmi2|none|cray\w*)\s*$", listed, re.MULTILINE)),
        srun_mpi=Mpi(mpi.flavour, mpi.version, "srun") if mpi is not None and srun else None,
        cray=library is not None and library.cray,
        intel_pmi=bool(environ.get("I_MPI_PMI_LIBRARY")),
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


def find_container_runtime(asked: str, image: str, target: str, environ: Mapping[str, str], *, by_srun: bool) -> str:
    """Return what starts containers. Its name decides alone where it is asked for, as the job may run elsewhere.

    `asked`: pyxis, apptainer or auto; `target`: what starts the ranks, by srun or not. Pyxis cannot open a file of
    Apptainer. Errors: LaunchError if auto found none, or pyxis cannot be used.
    """
    names = [name for name in (APPTAINER, SINGULARITY) if shutil.which(name, path=environ.get("PATH", os.defpath))]
    is_sif = image.endswith(".sif")
    if asked == PYXIS and (is_sif or not by_srun):
        raise LaunchError(
            "pyxis cannot start this container",
            expected="--to srun or slurm, and an image of a registry or a file of squashfs",
            found=f"--to {target} and {image}",
            next_step="--container_runtime apptainer",
        )
    if asked == APPTAINER:
        return SINGULARITY if names == [SINGULARITY] else APPTAINER
    if asked == PYXIS or (by_srun and not is_sif and "--container-image" in output(["srun", "--help"], environ)):
        return PYXIS
    if names:
        return names[0]
    or_pyxis = ", or --container-image in srun --help (pyxis)" if by_srun else ""
    raise LaunchError(
        "nothing on this machine starts containers",
        expected=f"apptainer or singularity on PATH{or_pyxis}",
        next_step="load its module; or name what the hosts of the job have: --container_runtime apptainer",
    )
