"""Facts about a host, gathered on it without importing torch or Horovod."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hvdtrain import __version__
from hvdtrain.doctor.facts.gpu import driver_version, gpu_models
from hvdtrain.doctor.facts.installation import horovod_mismatch, package_version
from hvdtrain.doctor.facts.machine import Limits, limits
from hvdtrain.doctor.facts.mpi import mpi_versions
from hvdtrain.doctor.facts.network import Interface, interfaces
from hvdtrain.runtime.host import HostFacts, read_host


@dataclass(frozen=True)
class HostReport:
    """Facts about a host, sent as JSON. A text is "" and a tuple is empty if there is nothing."""

    name: str  # host name of the system
    address: str  # that ssh connected to; "" for the doctor's own host
    hvdtrain: str  # its version, as for the other packages
    python: str
    torch: str
    horovod: str
    horovod_wrong: str  # why this Horovod cannot run on this host
    mpi4py: str
    libmpi: str  # version of the MPI library that Horovod loads
    mpirun: str  # version of the mpirun on PATH, or next to Python
    kernel: str  # operating system
    machine: str  # processor type
    gpus: tuple[str, ...]  # models
    driver: str  # version of NVIDIA's driver
    host: HostFacts
    limits: Limits
    folder: bool  # whether the working folder exists
    interfaces: tuple[Interface, ...]  # with an IPv4 address, except the loopback


def report_host(environ: Mapping[str, str], folder: str) -> HostReport:
    """Gather the facts about this host, in a second or two. ``folder``: working folder of the ranks."""
    with ThreadPoolExecutor(2) as pool:
        mpi = mpi_versions(environ, pool, Path(sys.executable).parent)
    connection = environ.get("SSH_CONNECTION", "").split()
    return HostReport(
        name=platform.node(),
        address=connection[2] if len(connection) == 4 else "",
        hvdtrain=__version__,
        python=platform.python_version(),
        torch=package_version("torch") or "",
        horovod=package_version("horovod") or "",
        horovod_wrong=" ".join((horovod_mismatch() or "").split()) if package_version("horovod") else "",
        mpi4py=package_version("mpi4py") or "",
        libmpi=mpi.library_version or "",
        mpirun=mpi.mpirun_version or "",
        kernel=f"{platform.system()} {platform.release()}",
        machine=platform.machine(),
        gpus=gpu_models(),
        driver=driver_version() or "",
        host=read_host(environ),
        limits=limits(),
        folder=Path(folder).is_dir(),
        interfaces=tuple(one for one in interfaces() if one.address and not one.loopback),
    )
