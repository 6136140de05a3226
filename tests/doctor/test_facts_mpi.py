"""Which MPI is found, from all its sides: in libraries as a linker writes them, and in what programs say."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hvdtrain.doctor.facts.installation import MpiFacts, find_nccl, mpi_facts
from hvdtrain.runtime.environment import RankInfo
from tests.runtime.libraries import horovod, open_mpi, write_library

ALONE = RankInfo()


def facts_of(monkeypatch: pytest.MonkeyPatch, library: Path, info: RankInfo = ALONE, **environ: str) -> MpiFacts:
    monkeypatch.setattr("hvdtrain.runtime.mpi.horovod_library", lambda: library)
    with ThreadPoolExecutor(8) as pool:
        return mpi_facts(info, {"PATH": "/no/programs", **environ}, pool, None)


def test_missing_folders_of_the_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = facts_of(monkeypatch, horovod(tmp_path, runpath="/gone/lib:/usr", soname="libmpi.so.12"))
    assert found.library is not None
    if found.library.path is None:  # this machine has no MPICH
        assert found.missing_folders == (Path("/gone/lib"),)
    assert found.mpirun is None and not found.horovodrun


def test_all_facts_of_an_mpi_are_gathered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    libmpi = open_mpi(tmp_path / "real", 4)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "link/bin").mkdir()
    (tmp_path / "link/bin/mpirun").touch()
    library = horovod(tmp_path, runpath=str(tmp_path / "link/lib"))
    found = facts_of(monkeypatch, library, OPAL_PREFIX=str(tmp_path / "link"))
    assert found.file == libmpi and found.prefix == tmp_path / "real"
    assert found.programs == tmp_path / "real/bin"
    assert found.ucx is False and found.missing_folders == ()
    (libmpi.parent / "openmpi").mkdir()
    (libmpi.parent / "openmpi/mca_pml_ucx.so").touch()
    assert facts_of(monkeypatch, library).ucx is True


def test_ucx_within_a_library_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_library(tmp_path / "lib/libmpi.so.40", ["libopen-pal.so.80"])
    write_library(tmp_path / "lib/libopen-pal.so.80.0.5", ["libucp.so.0"])
    assert facts_of(monkeypatch, horovod(tmp_path, runpath=str(tmp_path / "lib"))).ucx is True


def test_a_missing_nccl(tmp_path: Path) -> None:
    write_library(tmp_path / "here/libnccl.so.2", [])
    there = write_library(tmp_path / "a.so", ["libc.so.6", "libnccl.so.2"], runpath=f"{tmp_path}/here")
    gone = write_library(tmp_path / "b.so", ["libnccl.so.2"], runpath=f"{tmp_path}/gone")
    found, missing = find_nccl(there, {}), find_nccl(gone, {})
    assert found is not None and found.path == tmp_path / "here/libnccl.so.2"
    assert missing is not None and missing.folders == (tmp_path / "gone",)
    if missing.path:  # this machine has one of its own
        assert not missing.path.is_relative_to(tmp_path)
    assert find_nccl(write_library(tmp_path / "c.so", ["libc.so.6"]), {}) is None
    assert find_nccl(None, {}) is None


def test_a_rank_of_another_mpi_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    libmpi = write_library(tmp_path / "lib/libmpi.so.12", ["libc.so.6"])
    library = horovod(tmp_path, "libmpi.so.12", runpath=str(libmpi.parent))
    found = facts_of(monkeypatch, library, RankInfo("openmpi", 0, 2, 0, 2))
    assert found.refusal is not None and "build-horovod" in str(found.refusal.next_step)


def test_ranks_of_torchrun_are_not_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The doctor does not know the engine; some need no Horovod."""
    assert facts_of(monkeypatch, horovod(tmp_path), RankInfo("torchrun", 0, 2, 0, 2)).refusal is None
