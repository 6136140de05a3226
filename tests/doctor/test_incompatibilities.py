"""What is known not to fit together, provoked for real: doctor has to name it and its cure.

A Horovod of another torch, a small /dev/shm. tests/install has what only a build meets, test_real_mpis.py other MPIs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.runtime.launched import srun
from tests.support.doctor import Findings, as_in_a_container, horovod_of_version, horovod_that_does, look

BUILD = "hvdtrain build-horovod"
NOWHERE = {"OPAL_PREFIX": "/nowhere"}
ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
UNDEFINED = "raise ImportError('mpi_lib_v2.so: undefined symbol: _ZN2at4_ops5zeros4callEv')"
Provoke = Callable[[Path], Findings]


PROVOKED: dict[str, tuple[Provoke, list[tuple[str, str, str, str]]]] = {
    "torch was changed after the build": (
        lambda folder: look(environment=horovod_of_version(folder, "0.28.1+torch1.13.0.cu117.openmpi4.1.8")),
        [("horovod", "broken", "torch 1.13.0+cu117", BUILD)],
    ),
    "an upgraded torch gives undefined symbols": (
        lambda folder: look(environment=horovod_that_does(folder, UNDEFINED)),
        [("horovod", "broken", "built for another torch", BUILD)],
    ),
    "no programs on PATH": (
        lambda folder: look(environment={"PATH": "/no/programs"}),
        [("mpirun", "warning", "none on PATH", "export PATH="), ("horovodrun", "warning", "PATH", "PATH=")],
    ),
    "a container without ssh": (
        lambda folder: look(environment={"PATH": str(Path(sys.executable).parent)}),
        [("remote_shell", "warning", "ssh", "only: export OMPI_MCA_plm_rsh_agent=/bin/false")],
    ),
    "srun without any PMI": (
        lambda folder: look(environment=srun(0)),
        [("launcher", "broken", "", "hvdtrain launch, which uses Gloo")],
    ),
    "folders that are not there": (
        lambda folder: look("--run_dir", "/proc/runs", environment=NOWHERE),
        [
            ("opal_prefix", "broken", "/nowhere", "unset OPAL_PREFIX"),
            ("run_dir", "broken", "not writable", "another folder"),
        ],
    ),
    "horovodrun --gloo": (
        lambda folder: look(environment={"HF_TOKEN": "x"}, launcher="horovodrun --gloo", size=2),
        [
            ("rendezvous", "warning", "replace ranks' addresses", "hvdtrain launch"),
            ("secrets", "warning", "HF_TOKEN", "hvdtrain launch"),
        ],
    ),
    "a container": (
        lambda folder: look(before=as_in_a_container("64m", "nobody-knows-me")),
        [
            ("shm", "warning", "64 MiB", "--shm-size"),
            ("host_name", "warning", "nobody-knows-me does not resolve", "/etc/hosts"),
        ],
    ),
    "few open files": (
        lambda folder: look(before=["prlimit", "--nofile=100:200"]),
        [("files", "warning", "200 open files at most", "limits.conf")],
    ),
}


def _check(found: Findings, expected: list[tuple[str, str, str, str]]) -> None:
    for name, level, said, cure in expected:
        one = found[name]
        assert one["level"] == level and said in f"{one['found']} {one['why']}" and cure in one["mend"], one


@pytest.mark.slow
@pytest.mark.parametrize("what", PROVOKED)
def test_it_is_named_with_its_cure(what: str, tmp_path: Path) -> None:
    provoke, expected = PROVOKED[what]
    _check(provoke(tmp_path), expected)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 and "CI" not in os.environ, reason="this user is not root")
def test_root_may_not_run_mpirun_without_two_variables() -> None:
    _check(look(without=ROOT), [("root", "warning", "root", f"export {ROOT[0]}=1 {ROOT[1]}=1")])


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")
def test_plain_mpirun_binds_a_rank_to_one_core() -> None:
    _check(look(launcher="mpirun", size=1), [("binding", "warning", "1 core", "--bind-to none")])
