"""Which MPI Horovod loads, which one would start the ranks, and which one mpi4py loads."""

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
from hvdtrain.runtime.elf import read_linkage
from hvdtrain.runtime.environment import RankInfo
from hvdtrain.runtime.mpi import MpiLibrary
from hvdtrain.runtime.other_launchers import refuse_unused_launcher
from hvdtrain.runtime.site import site_settings

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
    """mpi4py.

    Attributes:
        answer: ``version``, and what its MPI ``says`` of itself.
        library: the libmpi that it loads, links followed.
        wheel: whether it looks for an MPI when it is imported; else it was compiled for one.
    """

    answer: Answer
    library: Path | None = None
    wheel: bool = True


@dataclass(frozen=True)
class MpiFacts:
    """MPI, from all its sides.

    Attributes:
        library, library_version: the libmpi that Horovod loads.
        file: its path, links followed.
        programs: the folder of its own mpirun, where that is found.
        prefix: what OPAL_PREFIX names, links followed.
        gone: folders where Horovod's library was built to look for libmpi, and that are not there.
        mpirun, mpirun_version: the mpirun on PATH.
        horovodrun: whether it is on PATH.
        refusal: why the ranks that the launcher started cannot join.
        mpi4py: None where it is not installed.
        ucx: whether that Open MPI can use UCX; None where that cannot be known.
        site: what Open MPI's parameter files set, as `runtime.site.site_settings` gives it.
    """

    library: MpiLibrary | None = None
    library_version: str | None = None
    file: Path | None = None
    programs: Path | None = None
    prefix: Path | None = None
    gone: tuple[Path, ...] = ()
    mpirun: str | None = None
    mpirun_version: str | None = None
    horovodrun: bool = True
    refusal: LaunchError | None = None
    mpi4py: Mpi4py | None = None
    ucx: bool | None = None
    site: Mapping[str, tuple[str, Path]] = field(default_factory=dict)


def mpi_facts(
    info: RankInfo, environ: Mapping[str, str], pool: Executor, refusal: LaunchError | None = None
) -> MpiFacts:
    """Find the MPIs and ask them for their versions."""
    horovod = mpi.horovod_library()
    library = mpi.mpi_library(horovod, environ)
    path = library.path if library else None
    places = environ.get("PATH", os.defpath)
    prefix = environ.get("OPAL_PREFIX")
    mpirun = shutil.which("mpirun", path=places)
    mpi4py_says = pool.submit(_mpi4py)
    library_says = pool.submit(mpi.library_version, path)
    mpirun_says = pool.submit(mpi.mpirun_version, mpirun)
    return MpiFacts(
        library=library,
        library_version=library_says.result(),
        file=path.resolve() if path else None,
        programs=mpirun_of_library.parent if (mpirun_of_library := own_mpirun(path)) else None,
        prefix=Path(prefix).resolve() if prefix else None,
        gone=_gone(horovod) if library and path is None else (),
        mpirun=mpirun,
        mpirun_version=mpirun_says.result(),
        horovodrun=shutil.which("horovodrun", path=places) is not None,
        refusal=refusal or _refusal(info, environ),
        mpi4py=mpi4py_says.result(),
        ucx=_ucx(path) if library and library.family == "openmpi" and path else None,
        site=site_settings(environ, path) if library and library.family == "openmpi" else {},
    )


def _refusal(info: RankInfo, environ: Mapping[str, str]) -> LaunchError | None:
    try:
        refuse_unused_launcher(replace(info, variables=environ))
        mpi.check_launch(info, variables=environ)
    except LaunchError as error:
        return error
    return None


def _mpi4py() -> Mpi4py | None:
    found = importlib.util.find_spec("mpi4py")
    if found is None or found.origin is None:
        return None
    says = ask(_MPI4PY)
    path = says.values.get("path")
    return Mpi4py(says, Path(path).resolve() if path else None, (Path(found.origin).parent / "_mpiabi.py").exists())


def _gone(horovod: Path | None) -> tuple[Path, ...]:
    if horovod is None:
        return ()
    linkage = read_linkage(horovod)
    folders = (Path(os.path.normpath(folder)) for folder in (*linkage.rpath, *linkage.runpath))
    return tuple(folder for folder in folders if not folder.is_dir())


def _ucx(libmpi: Path) -> bool:
    """Look for Open MPI's component for UCX: a file of its own, or part of its libraries, as in version 5."""
    folder = libmpi.resolve().parent
    parts = [libmpi, *folder.glob("libopen-pal.so.*")]
    return any(folder.glob("openmpi*/mca_pml_ucx.so")) or any(
        soname.startswith("libucp.") for part in parts for soname in read_linkage(part).needed
    )
