"""Facts about the packages in this Python environment: torch, Horovod, what it was built for, and MPI."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path

from hvdtrain.errors import HorovodError, LaunchError
from hvdtrain.install import record
from hvdtrain.install.versions import own_mpirun
from hvdtrain.programs import Answer, ask
from hvdtrain.runtime import mpi
from hvdtrain.runtime.environment import RankInfo, refuse_unused_launcher
from hvdtrain.runtime.mpi import Linkage, MpiLibrary, find_needed, horovod_library, read_linkage
from hvdtrain.runtime.tuning import site_settings

PACKAGES = ("hvdtrain", "numpy", "transformers")

_TORCH = """
import json, warnings
with warnings.catch_warnings(record=True) as messages:
    warnings.simplefilter("always")
    import torch
    torch.cuda.is_available()
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    gpus = [gpu.name for gpu in found]
    pci = [(gpu.pci_domain_id, gpu.pci_bus_id, gpu.pci_device_id) for gpu in found if hasattr(gpu, "pci_bus_id")]
values = {"version": torch.__version__, "cuda": torch.version.cuda, "threads": torch.get_num_threads(), "gpus": gpus,
          "pci": ["%04x:%02x:%02x.0" % address for address in pci],
          "driver_warnings": [str(warning.message) for warning in messages if "driver" in str(warning.message).lower()]}
if torch.version.cuda:
    try:
        values["nccl"] = ".".join(map(str, torch.cuda.nccl.version()[:2]))
    except (AttributeError, RuntimeError):  # a torch that was built without NCCL
        pass
if gpus:
    values["capability"] = min(torch.cuda.get_device_capability(index) for index in range(len(gpus)))
    try:
        torch.empty(1 << 26, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        values["pinned"] = str(error).splitlines()[0]
print(json.dumps(values))
"""
_HOROVOD = """
import json, horovod, horovod.torch as hvd
def loaded(*beginnings):
    with open("/proc/self/maps") as lines:
        files = [line.split(None, 5)[5].strip() for line in lines if line.count("/")]
    return next((file for file in files if file.rpartition("/")[2].startswith(beginnings)), None)
print(json.dumps({"version": horovod.__version__, "mpi": bool(hvd.mpi_built()), "gloo": bool(hvd.gloo_built()),
                  "nccl": bool(hvd.nccl_built()), "cuda": bool(hvd.cuda_built()), "libmpi": loaded("libmpi.so"),
                  "libnccl": loaded("libnccl.so")}))
"""


@dataclass(frozen=True)
class LinkedLibrary:
    """A library that Horovod is linked to. ``path`` is None if it is missing; Horovod searches ``folders``."""

    soname: str
    path: Path | None
    folders: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Installation:
    """The packages in this Python environment."""

    packages: Mapping[str, str | None]  # version by name; None if not installed
    torch: Answer  # what torch reports about itself, in a child process
    horovod: Answer  # the same of Horovod
    record: record.BuildRecord | None = None  # what the installed Horovod was built for
    mismatch: str | None = None  # why this Horovod cannot run here
    nccl: LinkedLibrary | None = None  # the libnccl that Horovod's library needs
    python: tuple[int, int] = (3, 11)  # major and minor version of the interpreter
    distutils: bool = True  # whether a module of that name exists


def installation(environ: Mapping[str, str], pool: Executor) -> Installation:
    """Gather the facts. This takes as long as importing torch and Horovod."""
    torch, horovod = pool.submit(ask, _TORCH), pool.submit(ask, _HOROVOD)
    return Installation(
        packages={name: package_version(name) for name in PACKAGES},
        record=record.installed(),
        mismatch=horovod_mismatch(),
        nccl=find_nccl(horovod_library(), environ),
        python=sys.version_info[:2],
        distutils=sys.version_info < (3, 12) or importlib.util.find_spec("distutils") is not None,
        torch=torch.result(),
        horovod=horovod.result(),
    )


def find_nccl(library: Path | None, environ: Mapping[str, str]) -> LinkedLibrary | None:
    """Find the libnccl that a library is linked to."""
    linkage = read_linkage(library) if library else Linkage()
    soname = next((name for name in linkage.needed if name.startswith("libnccl.so")), None)
    if soname is None:
        return None
    path = find_needed(soname, linkage, environ.get("LD_LIBRARY_PATH", ""))
    return LinkedLibrary(soname, path, (*linkage.rpath, *linkage.runpath))


def package_version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def horovod_mismatch() -> str | None:
    """Return why the installed Horovod cannot run here, or None."""
    try:
        record.check()
    except HorovodError as error:
        return str(error)
    return None


@dataclass(frozen=True)
class MpiFacts:
    """Everything about MPI."""

    library: MpiLibrary | None = None  # the libmpi that Horovod loads
    library_version: str | None = None
    mpirun: str | None = None  # the mpirun on PATH
    mpirun_version: str | None = None
    file: Path | None = None  # path of the library, with links resolved
    programs: Path | None = None  # folder of the library's own mpirun, if it exists
    prefix: Path | None = None  # folder in OPAL_PREFIX, with links resolved
    missing_folders: tuple[Path, ...] = ()  # where Horovod's library searches for libmpi, but which do not exist
    horovodrun: bool = True  # whether it is on PATH
    refusal: LaunchError | None = None  # why the ranks of the launcher cannot form a job
    ucx: bool | None = None  # whether that Open MPI can use UCX; None if unknown
    site: Mapping[str, tuple[str, Path]] = field(default_factory=dict)  # from `runtime.tuning.site_settings`


def mpi_facts(info: RankInfo, environ: Mapping[str, str], pool: Executor, refusal: LaunchError | None) -> MpiFacts:
    """Gather the facts. ``refusal``: error of the launcher's variables, if known."""
    known = mpi_versions(environ, pool)
    library = known.library
    path = library.path if library else None
    prefix = environ.get("OPAL_PREFIX")
    return replace(
        known,
        file=path.resolve() if path else None,
        programs=mpirun_of_library.parent if (mpirun_of_library := own_mpirun(path)) else None,
        prefix=Path(prefix).resolve() if prefix else None,
        missing_folders=_missing_folders() if library and path is None else (),
        horovodrun=shutil.which("horovodrun", path=environ.get("PATH", os.defpath)) is not None,
        refusal=refusal or _refusal(replace(info, variables=environ)),
        ucx=_ucx(path) if library and library.family == "openmpi" and path else None,
        site=site_settings(environ, path) if library and library.family == "openmpi" else {},
    )


def mpi_versions(environ: Mapping[str, str], pool: Executor, programs: Path | None = None) -> MpiFacts:
    """Find Horovod's libmpi, and an mpirun on PATH or then in `programs`, and ask both for their versions."""
    library = mpi.mpi_library(mpi.horovod_library(), environ)
    folders = [environ.get("PATH", os.defpath), *([str(programs)] if programs else [])]
    mpirun = shutil.which("mpirun", path=os.pathsep.join(folders))
    library_version = pool.submit(mpi.library_version, library.path if library else None)
    mpirun_version = pool.submit(mpi.mpirun_version, mpirun)
    return MpiFacts(library, library_version.result(), mpirun, mpirun_version.result())


def _refusal(info: RankInfo) -> LaunchError | None:
    try:
        refuse_unused_launcher(info, horovod=False)  # the check of the launcher names the engines of torchrun
        mpi.check_launch(info)
    except LaunchError as error:
        return error
    return None


def _missing_folders() -> tuple[Path, ...]:
    horovod = mpi.horovod_library()
    assert horovod is not None  # it names the libmpi
    linkage = read_linkage(horovod)
    folders = (Path(os.path.normpath(folder)) for folder in (*linkage.rpath, *linkage.runpath))
    return tuple(folder for folder in folders if not folder.is_dir())


def _ucx(libmpi: Path) -> bool:
    """Look for Open MPI's UCX component: a separate file, or part of its libraries as in version 5."""
    folder = libmpi.resolve().parent
    parts = [libmpi, *folder.glob("libopen-pal.so.*")]
    return any(folder.glob("openmpi*/mca_pml_ucx.so")) or any(
        soname.startswith("libucp.") for part in parts for soname in read_linkage(part).needed
    )
