"""Facts about MPI: the library that Horovod loads, the mpirun on PATH, and the library that mpi4py loads."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from pathlib import Path

from hvdtrain.doctor.facts.child import LOADED, Answer, ask
from hvdtrain.errors import LaunchError
from hvdtrain.install.mpirun import own_mpirun
from hvdtrain.runtime import mpi
from hvdtrain.runtime.environment import RankInfo, refuse_unused_launcher
from hvdtrain.runtime.mpi import MpiLibrary, read_linkage
from hvdtrain.runtime.tuning import site_settings

_MPI4PY = f"""
import json, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
{LOADED}
print(json.dumps({{"version": mpi4py.__version__, "says": MPI.Get_library_version().splitlines()[0],
                  "path": loaded("libmpi.so", "libmpich.so", "libmpi_abi.so")}}))
"""


@dataclass(frozen=True)
class Mpi4py:
    """The installed mpi4py."""

    answer: Answer  # its ``version``, and the version text of its MPI (``says``)
    library: Path | None = None  # the libmpi that it loads, with links resolved
    wheel: bool = True  # whether it searches for an MPI when it is imported; otherwise it was compiled for one


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
    mpi4py: Mpi4py | None = None  # None if it is not installed
    ucx: bool | None = None  # whether that Open MPI can use UCX; None if unknown
    site: Mapping[str, tuple[str, Path]] = field(default_factory=dict)  # from `runtime.tuning.site_settings`


def mpi_facts(info: RankInfo, environ: Mapping[str, str], pool: Executor, refusal: LaunchError | None) -> MpiFacts:
    """Gather the facts. ``refusal``: error of the launcher's variables, if known."""
    mpi4py = pool.submit(_mpi4py)
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
        mpi4py=mpi4py.result(),
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


def _mpi4py() -> Mpi4py | None:
    found = importlib.util.find_spec("mpi4py")
    if found is None or found.origin is None:
        return None
    answer = ask(_MPI4PY)
    path = answer.values.get("path")
    return Mpi4py(answer, Path(path).resolve() if path else None, (Path(found.origin).parent / "_mpiabi.py").exists())


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
