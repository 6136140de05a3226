"""Detect the MPI that Horovod loads, and check that it is the launcher's.

A rank with another MPI library than its mpirun does not fail cleanly. With Horovod on Open MPI 4.1.8: under MPICH's
mpirun each rank aborts in C, or, worse, becomes a job of its own that trains alone. Under Open MPI 5's mpirun, with
version 4's library first in LD_LIBRARY_PATH, it aborts; otherwise it runs, as Open MPI's mpirun puts its own library
folder first, and version 5's library supports a Horovod built on version 4. Version 5's library also starts under
version 4's mpirun. So the library that the loader will choose decides, and this module finds it without loading it,
which could abort the process: it reads the dynamic section of ELF files (System V ABI, chapter 5), little-endian 64 bit
only (x86-64 and AArch64), with a few seeks.
"""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import BinaryIO

from hvdtrain.errors import LaunchError
from hvdtrain.install.versions import MpiBuild, own_mpirun, version_text, wheel_prefix
from hvdtrain.programs import answer
from hvdtrain.runtime.environment import ANY_MPI, RankInfo, environ, rank_label

_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NULL, _DT_NEEDED, _DT_STRTAB, _DT_STRSZ, _DT_RPATH, _DT_RUNPATH = 0, 1, 5, 10, 15, 29

# the soname identifies the family: MPICH, Intel, MVAPICH and Cray share one ABI; Cray's names the compiler, as gnu_123
_SONAMES = (
    (re.compile(r"libmpi\.so\.(20|40)"), "openmpi"),
    (re.compile(r"lib(mpi|mpich|mpi_(cray|gnu|intel|nvidia|amd|aocc)(_\d+)?)\.so\.12|libmpi_abi\.so\.[01]"), "mpich"),
)
_NAMES = {"openmpi": "Open MPI", "mpich": "MPICH or Intel MPI"}
_PMI = ("PMIX_RANK", "PMI_RANK", "PMI_FD")  # variables that srun sets for a task with PMI

_ASK_VERSION = """
import ctypes, json, sys
library = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
text, length = ctypes.create_string_buffer(8192), ctypes.c_int()
library.MPI_Get_library_version(text, ctypes.byref(length))
print(json.dumps({"version": text.value.decode(errors="replace")}))
"""


@dataclass(frozen=True)
class Linkage:
    """Dynamic linkage. needed: sonames; rpath, runpath: folders with ``$ORIGIN`` expanded."""

    needed: tuple[str, ...] = ()
    rpath: tuple[Path, ...] = ()
    runpath: tuple[Path, ...] = ()


def read_linkage(library: Path) -> Linkage:
    """Read the linkage of a shared library; empty for other files. Errors: OSError."""
    with library.open("rb") as file:
        try:
            return _read(file, library.resolve().parent)
        except (struct.error, ValueError):
            return Linkage()


def _read(file: BinaryIO, origin: Path) -> Linkage:
    header = file.read(64)
    if header[:6] != b"\x7fELF\x02\x01":
        return Linkage()
    offset, size, count = struct.unpack_from("<32xQ14xHH", header)
    file.seek(offset)
    table = file.read(size * count)
    # per program header: type, offset in the file, address, size in the file
    segments = [struct.unpack_from("<I4xQQ8xQ", table, index * size) for index in range(count)]
    dynamic = next((segment for segment in segments if segment[0] == _PT_DYNAMIC), None)
    if dynamic is None:
        return Linkage()
    file.seek(dynamic[1])
    section = struct.iter_unpack("<qQ", file.read(dynamic[3]))
    entries: list[tuple[int, int]] = list(takewhile(lambda entry: entry[0] != _DT_NULL, section))
    values = dict(entries)
    address, length = values[_DT_STRTAB], values[_DT_STRSZ]
    home = next(part for part in segments if part[0] == _PT_LOAD and part[2] <= address < part[2] + part[3])
    file.seek(home[1] + address - home[2])
    strings = file.read(length)

    def texts(tag: int) -> Iterator[str]:
        for found, start in entries:
            if found == tag:
                yield strings[start : strings.index(b"\0", start)].decode()

    def folders(tag: int) -> tuple[Path, ...]:
        paths = [part for text in texts(tag) for part in text.split(":") if part]
        return tuple(Path(part.replace("${ORIGIN}", "$ORIGIN").replace("$ORIGIN", str(origin))) for part in paths)

    return Linkage(tuple(texts(_DT_NEEDED)), folders(_DT_RPATH), folders(_DT_RUNPATH))


def find_needed(name: str, linkage: Linkage, library_path: str) -> Path | None:
    """Return the file that the loader would load for a soname; None where only the loader's cache knows.

    The order is ld.so's: RPATH unless there is a RUNPATH, ``LD_LIBRARY_PATH``, RUNPATH, the system's folders.
    """
    rpath = () if linkage.runpath else linkage.rpath
    listed = [Path(part) for part in library_path.replace(";", ":").split(":") if part]
    system = [Path("/lib/x86_64-linux-gnu"), Path("/lib/aarch64-linux-gnu"), Path("/lib64"), Path("/lib")]
    system += [Path("/usr") / folder.relative_to("/") for folder in system]
    for folder in (*rpath, *listed, *linkage.runpath, *system):
        if (folder / name).is_file():
            return folder.resolve() / name
    return None


@dataclass(frozen=True)
class MpiLibrary:
    """The libmpi to which Horovod's library is linked."""

    soname: str  # from Horovod's library, such as ``libmpi.so.40``
    family: str  # "openmpi", "mpich" (Intel MPI too), or "unknown"
    path: Path | None = None  # the file that the loader will load; None where only the loader's cache knows
    major: int | None = None  # of Open MPI only: 4 and 5 share a soname
    wheel: Path | None = None  # prefix of the environment if it is from a Python wheel, compiled for another prefix

    @property
    def cray(self) -> bool:
        """Whether it is Cray's MPICH."""
        return self.family == "mpich" and self.soname.startswith("libmpi_") and "_abi" not in self.soname

    def __str__(self) -> str:
        name = _NAMES.get(self.family, "an unknown MPI") + (f" {self.major}" if self.major else "")
        return f"{name} ({self.path or self.soname})"


def horovod_library() -> Path | None:
    """Return the path of Horovod's library for torch, without importing it; None without Horovod."""
    found = find_spec("horovod")
    if found is None or found.origin is None:
        return None
    return next(iter(sorted((Path(found.origin).parent / "torch").glob("mpi_lib_v2*.so"))), None)


def mpi_library(library: Path | None, environ: Mapping[str, str]) -> MpiLibrary | None:
    """Return the libmpi that Horovod's library will load; None without Horovod, or if it is built without MPI."""
    if library is None:
        return None
    linkage = read_linkage(library)
    for soname in linkage.needed:
        family = next((name for pattern, name in _SONAMES if pattern.fullmatch(soname)), None)
        if family is None:
            continue
        path = find_needed(soname, linkage, environ.get("LD_LIBRARY_PATH", ""))
        if path is None:
            return MpiLibrary(soname, family)
        core = read_linkage(path).needed if family == "openmpi" else ()  # Open MPI 4 and 5 are both libmpi.so.40
        major = 5 if "libopen-pal.so.80" in core else 4 if "libopen-pal.so.40" in core else None
        return MpiLibrary(soname, family, path, major, wheel_prefix(path.parent.parent))
    return None


def check_launch(info: RankInfo, library: Path | None = None) -> None:
    """Refuse to start where Horovod's MPI cannot join the launcher's ranks; call it before ``hvd.init()``.

    ``library`` is Horovod's (default: the installed one). Errors: LaunchError if mpirun of another MPI than Horovod's
    has started it, or srun without PMI, or Horovod has no MPI.
    """
    by = info.started_by
    if not by.mpi:
        return
    library = horovod_library() if library is None else library
    if library is None:
        return  # install.record reports that Horovod is missing
    variables = info.variables
    mpi = mpi_library(library, variables)
    if by.mpi == ANY_MPI:
        return _check_srun(info, mpi)
    is_5 = "PRTE_LAUNCHED" in variables or variables.get("OMPI_VERSION", "").startswith("5.")
    if mpi is not None and mpi.family in (by.mpi, "unknown") and not (mpi.major == 4 and is_5):
        return
    started = _NAMES[by.mpi]
    if by.mpi == "openmpi":
        started = f"Open MPI {variables.get('OMPI_VERSION', '5') if is_5 else '4'}"
    raise LaunchError(
        f"{rank_label(info)}: this process was started by another MPI than Horovod's",
        expected=f"mpirun of {mpi}" if mpi else "a Horovod with MPI, or a start by horovodrun --gloo",
        found=f"mpirun of {started}",
        next_step=_mend(mpi, info),
    )


def _check_srun(info: RankInfo, mpi: MpiLibrary | None) -> None:
    """Refuse srun without PMI: each rank would be alone, and Open MPI 4 aborts in C (4.1.8, 5.0.11 and MPICH 5.0.2)."""
    if any(sign in info.variables for sign in _PMI) or (info.size == 1 and mpi is not None and mpi.major != 4):
        return
    how = "--mpi=pmi2" if mpi is not None and mpi.family == "mpich" else "--mpi=pmix"
    raise LaunchError(
        f"{rank_label(info)}: srun started this process without PMI, which MPI needs to find the other ranks",
        expected=f"srun {how}, for {mpi}" if mpi else "a start over Gloo, as Horovod has no MPI",
        found=f"none of {', '.join(_PMI)} in the environment",
        next_step="hvdtrain launch, which uses Gloo where Slurm has no PMI for this MPI (srun --mpi=list)",
    )


def _mend(mpi: MpiLibrary | None, info: RankInfo) -> str:
    rebuild = "hvdtrain build-horovod, with this mpirun's mpicxx first on PATH"
    if mpi is None or mpi.path is None:
        return rebuild
    mpirun = own_mpirun(mpi.path)
    if mpirun is None:
        return f"start it with the mpirun of {mpi}; or build Horovod for this one: {rebuild}"
    return f"{mpirun} -np {info.size} ... ; or build Horovod for this MPI: {rebuild}"


def check_size(info: RankInfo, hvd_size: int) -> None:
    """Refuse to train where Horovod joined another number of ranks than were started; call it after ``hvd.init()``.

    Errors: LaunchError if the sizes differ; most often each rank became a job of its own.
    """
    if hvd_size == info.size:
        return
    raise LaunchError(
        f"{rank_label(info)}: Horovod did not join the ranks that {info.launcher} started",
        expected=f"{info.size} ranks",
        found=f"{hvd_size}" + (": each rank would train alone" if hvd_size == 1 else ""),
        next_step="start it with the mpirun that Horovod was built with, or horovodrun; see: hvdtrain doctor",
    )


def library_version(path: Path | None) -> str | None:
    """Return the version of a libmpi, from a child process, as MPI aborts in C. None when it does not answer."""
    if path is None:
        return None
    found = answer([sys.executable, "-I", "-c", _ASK_VERSION, str(path)], 20).values.get("version", "")
    return next((line.split(", ")[0].strip() for line in found.splitlines()[:1]), None)


def mpirun_version(program: str | None) -> str | None:
    """Return the version of an mpirun in one line; None when it does not answer."""
    text = version_text(program, environ()) if program is not None else ""
    build = MpiBuild.from_version_text(text)
    if build is not None and build.flavour == "mpich":
        return str(build)  # its first line has no version
    return next((line.strip() for line in text.splitlines() if line.strip()), None)
