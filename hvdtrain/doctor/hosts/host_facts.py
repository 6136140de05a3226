"""What a host says of itself; asked on it, without torch or Horovod being imported."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any

from hvdtrain import __version__
from hvdtrain.doctor.hosts.network import Interface, interfaces
from hvdtrain.errors import HvdtrainError
from hvdtrain.install import record
from hvdtrain.runtime import mpi
from hvdtrain.runtime.host import read_host


@dataclass(frozen=True)
class HostSays:
    """All of it goes through JSON. A text is "" and a tuple empty where there is nothing.

    Attributes:
        name: of the system itself.
        address: by which it was reached; "" where nobody came from elsewhere.
        hvdtrain, python, torch, horovod, mpi4py: versions.
        horovod_wrong: why the Horovod there cannot run there.
        libmpi, libmpi_path: which MPI Horovod loads.
        mpirun: which is on PATH, or beside Python.
        kernel, machine: of the operating system.
        cores: that ranks may use.
        gpus, driver: NVIDIA's names.
        fabric: whether MPI may go by other means than TCP.
        open_files, locked_bytes: limits of a process; -1 for none.
        folder: whether the working folder is there.
        interfaces: that have an IPv4 address, but the loopback.
    """

    name: str
    address: str
    hvdtrain: str
    python: str
    torch: str
    horovod: str
    horovod_wrong: str
    mpi4py: str
    libmpi: str
    libmpi_path: str
    mpirun: str
    kernel: str
    machine: str
    cores: int
    gpus: tuple[str, ...]
    driver: str
    fabric: bool
    open_files: int
    locked_bytes: int
    folder: bool
    interfaces: tuple[Interface, ...]

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> HostSays:
        """What came as JSON.

        Errors:
            KeyError: another hvdtrain has written it.
        """
        values = {field.name: found[field.name] for field in fields(cls)}
        own = tuple(Interface(**each) for each in values["interfaces"])
        return cls(**{**values, "gpus": tuple(values["gpus"]), "interfaces": own})


def host_says(environ: Mapping[str, str], folder: str) -> HostSays:
    """Ask this host; a second or two.

    Args:
        environ: of this process.
        folder: where ranks will work.
    """
    library = mpi.mpi_library(mpi.horovod_library(), environ)
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = shutil.which("mpirun", path=environ.get("PATH", os.defpath)) or (str(beside) if beside.exists() else None)
    with ThreadPoolExecutor(2) as pool:
        libmpi = pool.submit(mpi.library_version, library.path if library else None)
        version = pool.submit(mpi.mpirun_version, mpirun)
    facts = read_host(environ)
    came_by = environ.get("SSH_CONNECTION", "").split()
    return HostSays(
        name=platform.node(),
        address=came_by[2] if len(came_by) == 4 else "",
        hvdtrain=__version__,
        python=platform.python_version(),
        torch=_version("torch"),
        horovod=_version("horovod"),
        horovod_wrong=_horovod_wrong(),
        mpi4py=_version("mpi4py"),
        libmpi=libmpi.result() or "",
        libmpi_path=str(library.path or library.soname) if library else "",
        mpirun=version.result() or "",
        kernel=f"{platform.system()} {platform.release()}",
        machine=platform.machine(),
        cores=facts.cores,
        gpus=_gpus(),
        driver=_driver(),
        fabric=facts.fabric,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        folder=Path(folder).is_dir(),
        interfaces=tuple(interfaces()),
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _horovod_wrong() -> str:
    if not _version("horovod"):
        return ""
    try:
        record.check()
    except HvdtrainError as error:
        return " ".join(str(error).split())
    return ""


def _gpus(root: Path = Path("/proc/driver/nvidia")) -> tuple[str, ...]:
    """Their models, as the driver lists them: nothing has to be loaded for it."""
    found = []
    for file in sorted(root.glob("gpus/*/information")):
        lines = dict(line.partition(":")[::2] for line in file.read_text().splitlines())
        found.append(lines.get("Model", "").strip() or "a GPU")
    return tuple(found)


def _driver(root: Path = Path("/proc/driver/nvidia")) -> str:
    try:
        words = (root / "version").read_text().splitlines()[0].split()
    except (OSError, IndexError):
        return ""
    return next((word for word in words if word[0].isdigit() and "." in word), "")
