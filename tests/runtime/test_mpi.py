"""Which libmpi Horovod loads, and whether it is the launcher's; on libraries made here."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from contextlib import nullcontext
from pathlib import Path

import pytest

from hvdtrain.errors import LaunchError
from hvdtrain.runtime import mpi
from hvdtrain.runtime.environment import RankInfo, rank_info
from hvdtrain.runtime.mpi import (
    Linkage,
    check_launch,
    check_size,
    library_version,
    mpi_library,
    mpirun_version,
    read_linkage,
)
from tests.runtime import launched as ranks_of
from tests.runtime.libraries import horovod, open_mpi, write_library


def test_linkage_is_read_back(tmp_path: Path) -> None:
    made = write_library(tmp_path / "lib/x.so", ["liba.so.1", "libb.so"], "$ORIGIN/../deep:/opt/mpi", "/old")
    runpath = (Path(f"{tmp_path}/lib/../deep"), Path("/opt/mpi"))
    assert read_linkage(made) == Linkage(("liba.so.1", "libb.so"), (Path("/old"),), runpath)
    for content in (b"", b"#!/bin/sh\n", b"\x7fELF\x01\x01" + bytes(80), b"\x7fELF\x02\x01" + bytes(9)):
        made.write_bytes(content)  # no library
        assert read_linkage(made) == Linkage()


def test_linkage_of_real_libraries_equals_that_of_readelf() -> None:
    if shutil.which("readelf") is None:
        pytest.skip("readelf (binutils) is not installed")
    libraries = sorted(Path(sysconfig.get_path("stdlib"), "lib-dynload").glob("*.so"))[:20]
    libraries += [library for library in [mpi.horovod_library()] if library]
    assert libraries
    for library in libraries:
        said = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
        assert read_linkage(library).needed == tuple(re.findall(r"\(NEEDED\).*\[(.*)\]", said))


def test_the_loaders_order_is_kept(tmp_path: Path) -> None:
    first, second, third = (open_mpi(tmp_path / name, 4) for name in "abc")
    library = horovod(tmp_path, runpath=f"{second.parent}:{third.parent}")
    assert path_of(library, {"LD_LIBRARY_PATH": f"/none:{first.parent}"}) == first
    assert path_of(library, {}) == second
    second.unlink()
    assert path_of(library, {}) == third
    assert path_of(horovod(tmp_path / "up", runpath=f"{third.parent}/../lib"), {}) == third  # told without the ".."
    old = horovod(tmp_path / "old", rpath=str(third.parent))
    assert path_of(old, {"LD_LIBRARY_PATH": str(first.parent)}) == third
    both = horovod(tmp_path / "both", rpath=str(third.parent), runpath="/none")
    assert path_of(both, {"LD_LIBRARY_PATH": str(first.parent)}) == first


def path_of(library: Path, variables: dict[str, str]) -> Path | None:
    return getattr(mpi_library(library, variables), "path", None)


@pytest.mark.parametrize("major", [4, 5])
@pytest.mark.parametrize("wheel", [True, False])
def test_open_mpi_is_recognised(tmp_path: Path, major: int, wheel: bool) -> None:
    libmpi = open_mpi(tmp_path / "mpi", major, wheel)
    found = mpi_library(horovod(tmp_path, runpath=str(libmpi.parent)), {})
    assert found == mpi.MpiLibrary("libmpi.so.40", "openmpi", libmpi, major, tmp_path / "mpi" if wheel else None)


@pytest.mark.parametrize(
    "soname", ["libmpi.so.12", "libmpich.so.12", "libmpi_cray.so.12", "libmpi_gnu_123.so.12", "libmpi_abi.so.1"]
)
def test_the_mpich_family_is_recognised(tmp_path: Path, soname: str) -> None:
    assert mpi_library(horovod(tmp_path, soname), {}) == mpi.MpiLibrary(soname, "mpich")
    assert mpi_library(horovod(tmp_path, None), {}) is None


MAJOR = {"openmpi4": 4, "openmpi5": 5}


def start(library: Path, variables: dict[str, str]) -> None:
    check_launch(rank_info(variables, "node"), library)


def make(tmp_path: Path, kind: str) -> Path:
    if kind == "none":
        return horovod(tmp_path, None)
    if kind == "mpich":
        libmpi = write_library(tmp_path / "mpi/lib/libmpi.so.12", ["libc.so.6"])
    else:
        libmpi = open_mpi(tmp_path / "mpi", MAJOR[kind])
    return horovod(tmp_path, libmpi.name, runpath=str(libmpi.parent))


@pytest.mark.parametrize(
    ("kind", "launched"),
    [
        ("openmpi4", ranks_of.open_mpi_4),
        ("openmpi5", ranks_of.open_mpi_5),
        ("openmpi5", ranks_of.open_mpi_4),  # seen to run
        ("mpich", ranks_of.mpich),
        ("mpich", ranks_of.intel_mpi),
        ("mpich", ranks_of.horovodrun_gloo),
        ("none", ranks_of.horovodrun_gloo),
        ("openmpi4", ranks_of.srun_pmix),
        ("mpich", ranks_of.srun_pmi2),
    ],
)
def test_a_launcher_of_the_same_mpi_may_start_ranks(tmp_path: Path, kind: str, launched) -> None:
    start(make(tmp_path, kind), launched(1))


@pytest.mark.parametrize(("kind", "how"), [("openmpi4", "pmix"), ("openmpi5", "pmix"), ("mpich", "pmi2")])
def test_srun_without_pmi_is_refused(tmp_path: Path, kind: str, how: str) -> None:
    """Ranks of Open MPI 5 and MPICH would each train alone; Open MPI 4 aborts, where there is one rank too."""
    library = make(tmp_path, kind)
    with pytest.raises(LaunchError, match="hvdtrain launch, which uses Gloo") as error:
        start(library, ranks_of.srun(1))
    assert f"--mpi={how}" in str(error.value.expected)
    with pytest.raises(LaunchError) if kind == "openmpi4" else nullcontext():
        start(library, ranks_of.one_task())


@pytest.mark.parametrize(
    ("kind", "launched", "expected", "found"),
    [
        ("openmpi4", ranks_of.mpich, "Open MPI 4", "MPICH"),
        ("openmpi5", ranks_of.intel_mpi, "Open MPI 5", "Intel"),
        ("openmpi4", ranks_of.open_mpi_5, "Open MPI 4", "Open MPI 5.0.11"),
        ("mpich", ranks_of.open_mpi_4, "MPICH", "Open MPI 4"),
        ("mpich", ranks_of.open_mpi_5, "MPICH", "Open MPI 5.0.11"),
        ("none", ranks_of.open_mpi_4, "a Horovod with MPI", "Open MPI 4"),
        ("none", ranks_of.mpich, "a Horovod with MPI", "MPICH"),
    ],
)
def test_a_launcher_of_another_mpi_is_refused(tmp_path: Path, kind: str, launched, expected: str, found: str) -> None:
    library = make(tmp_path, kind)
    with pytest.raises(LaunchError) as error:
        start(library, launched(1))
    assert "rank 1/2 on node" in error.value.what
    assert expected in str(error.value.expected)
    assert found in str(error.value.found)
    assert "build-horovod" in str(error.value.next_step)
    if kind != "none":
        mpirun = tmp_path / "mpi/bin/mpirun"
        mpirun.parent.mkdir()
        mpirun.touch()
        with pytest.raises(LaunchError, match=re.escape(f"{mpirun} -np 2")):
            start(library, launched(1))


def test_open_mpi_5s_mpirun_brings_its_own_library(tmp_path: Path) -> None:
    """Measured: it puts its library's folder first, and Horovod built on version 4 runs on it."""
    own = open_mpi(tmp_path / "five", 5)
    start(make(tmp_path, "openmpi4"), ranks_of.open_mpi_5(0) | {"LD_LIBRARY_PATH": str(own.parent)})


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ("mpirun (Open MPI) 4.1.8\n\nReport bugs to ...", "mpirun (Open MPI) 4.1.8"),
        ("HYDRA build details:\n    Version:                                 5.0.2\n", "MPICH 5.0.2"),
    ],
)
def test_mpirun_tells_its_version(tmp_path: Path, said: str, version: str) -> None:
    program = tmp_path / "mpirun"
    assert mpirun_version(None) is mpirun_version(str(program)) is None
    assert library_version(open_mpi(tmp_path, 4)) is library_version(None) is mpi_library(None, {}) is None
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{said}\nEND\n")
    program.chmod(0o755)
    assert mpirun_version(str(program)) == version


def test_as_many_ranks_must_join_as_were_started() -> None:
    info = RankInfo("hydra", 1, 4, 1, 4, "node")
    check_size(info, 4)
    with pytest.raises(LaunchError, match="4 ranks"):
        check_size(info, 1)
