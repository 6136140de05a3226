"""How `make train` starts the job: by horovodrun, or by mpirun where horovodrun cannot drive the MPI."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.cli import start
from hvdtrain.install.versions import NO_SHELL, REMOTE_SHELL, ROOT_MAY_RUN, start_variables
from hvdtrain.launch.detect import Machine
from hvdtrain.launch.spec import Mpi
from tests.support.jobs import INTEL, MPICH, OPEN_MPI_4, OPEN_MPI_5

PROGRAM = ["python", "-m", "hvdtrain", "--train.steps", "5"]
ARGUMENTS = ["-np", "3", "--", *PROGRAM[3:]]


class _Became(Exception):
    """The process that would have become another program."""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call main on a machine with an MPI; the command line and the variables that it would become."""

    def become(program: str, argv: tuple[str, ...], variables: dict[str, str]) -> None:
        raise _Became(list(argv), variables)

    def call(mpi: Mpi | None, *, in_slurm: bool = False) -> tuple[list[str], dict[str, str]]:
        family = None if mpi is None else "openmpi" if mpi.flavour == "openmpi" else "mpich"
        machine = Machine((mpi,) if mpi else (), family, programs={"srun": "srun"}, in_slurm=in_slurm)
        monkeypatch.setattr(start, "detect_machine", lambda variables: machine)
        with pytest.raises(_Became) as became:
            start.main(ARGUMENTS)
        argv, variables = became.value.args
        return argv, variables

    monkeypatch.setattr("os.execvpe", become)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("hvdtrain.install.record.check", lambda: None)
    for name in (*ROOT_MAY_RUN, *REMOTE_SHELL):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(start, "has_remote_shell", lambda variables: True)
    return call


@pytest.mark.parametrize("in_slurm", [False, True])
def test_open_mpi_4_is_driven_by_horovodrun(run: Any, in_slurm: bool, capsys: pytest.CaptureFixture[str]) -> None:
    argv, variables = run(OPEN_MPI_4, in_slurm=in_slurm)
    assert argv == ["horovodrun", "-np", "3", "-H", "localhost:3", *PROGRAM]
    assert variables["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    assert capsys.readouterr().out == "+ horovodrun -np 3 -H localhost:3 python -m hvdtrain --train.steps 5\n"


@pytest.mark.parametrize("mpi", [OPEN_MPI_5, MPICH, INTEL])
def test_others_are_started_by_mpirun_with_a_reason(run: Any, mpi: Mpi, capsys: pytest.CaptureFixture[str]) -> None:
    argv, variables = run(mpi)
    assert argv[0].endswith(("mpirun", "mpiexec.hydra")) and argv[1:3] == ["-np", "3"]
    assert argv[-len(PROGRAM) :] == PROGRAM and not {*ROOT_MAY_RUN, *REMOTE_SHELL} & variables.keys()
    assert variables["PATH"].split(os.pathsep)[1] == str(Path(mpi.mpirun).parent) or mpi.mpirun == "mpirun"
    assert f"using mpirun of {mpi}\n+ " in capsys.readouterr().out


def test_open_mpi_starts_for_root_and_without_ssh(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(start, "has_remote_shell", lambda variables: False)
    for mpi, shell in ((OPEN_MPI_4, REMOTE_SHELL[0]), (OPEN_MPI_5, REMOTE_SHELL[1])):
        assert {**ROOT_MAY_RUN, shell: NO_SHELL}.items() <= run(mpi)[1].items()
    assert start_variables("openmpi", 4, is_root=False, remote_shell=True) == {}
    assert start_variables("mpich", 4, is_root=True, remote_shell=False) == {}


def test_a_missing_program_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("hvdtrain.install.record.check", lambda: None)
    monkeypatch.setattr(start, "detect_machine", lambda variables: Machine((MPICH,), "openmpi"))
    assert start.main(["-np", "2"]) == start.main(["-np", "0"]) == 1
    said = capsys.readouterr().err
    assert "make setup" in said and "NP=0" in said
