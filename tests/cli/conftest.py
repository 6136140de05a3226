"""``hvdtrain launch`` in this process, on a made-up machine."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from hvdtrain.cli import launch as command
from hvdtrain.launch.detect import Machine
from tests.support.jobs import OPEN_MPI_4

Launch = Callable[..., tuple[str, str]]
MACHINE = Machine((OPEN_MPI_4,), "openmpi", srun=True, slurm_mpi=("none", "pmix"))


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Launch:
    """Call launch in an empty folder, with few variables; what it writes to stdout and stderr."""
    (tmp_path / "bin").mkdir()
    for name in ("mpirun", "srun", "qsub", "sbatch"):
        (tmp_path / "bin" / name).touch(0o755)
    monkeypatch.setattr(command, "detect_machine", lambda seen: replace(MACHINE, in_slurm="SLURM_JOB_ID" in seen))
    monkeypatch.setattr("hvdtrain.cli.launch_spec.has_remote_shell", lambda variables: True)
    monkeypatch.setattr(platform, "node", lambda: "login1.site.example")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() or 1000)
    monkeypatch.setattr(sys, "executable", "/venv/bin/python")
    monkeypatch.chdir(tmp_path)

    def call(*words: str, variables: Mapping[str, str] | None = None, code: int = 0) -> tuple[str, str]:
        monkeypatch.setattr(os, "environ", {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", **(variables or {})})
        try:
            ended = command.main(list(words))
        except SystemExit as end:
            ended = int(str(end.code))
        said = capsys.readouterr()
        assert ended == code, said.err
        return said.out, said.err

    return call
