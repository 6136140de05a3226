"""A host name without an address, as in some containers: Gloo would crash, so ranks end with advice."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.errors import LaunchError
from hvdtrain.runtime.interfaces import refuse_without_address
from tests.support.doctor import as_in_a_container
from tests.support.launch import ENVIRONMENT, ROOT, TIMEOUT_S, command

pytestmark = pytest.mark.slow

NAMELESS = "nobody-knows-me"


@pytest.mark.parametrize("launcher", ["horovodrun --gloo", "mpirun", "hvdtrain launch"])
def test_a_missing_address_is_an_error_for_gloo_but_not_for_mpi(launcher: str, tmp_path: Path) -> None:
    toy = [f"--task={ROOT}/tests/support/toy.py:toy", "--train.steps=2", "--run_dir=run"]
    program = [sys.executable, "-m", "hvdtrain"]
    own = [*program, "launch", "--to", "hvdtrain", "-np", "2", "--"]
    start = own if launcher == "hvdtrain launch" else [*command(2, launcher=launcher), *program]
    path = os.pathsep.join([str(Path(sys.executable).parent), ENVIRONMENT["PATH"]])
    environment = {**ENVIRONMENT, "PATH": path, "PYTHONPATH": str(ROOT)}
    argv = [*as_in_a_container("256m", NAMELESS), *start, *toy]
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    output = done.stderr + done.stdout
    if launcher == "mpirun":
        assert done.returncode == 0 and "finished at step 2 of 2" in output, output
    else:
        assert done.returncode == (1 if launcher.startswith("horovodrun") else 2), output
        assert f"127.0.1.1 {NAMELESS}" in output and "egmentation" not in output


@pytest.mark.parametrize("name", ["nobody-knows-me.invalid", "localhost"])
def test_one_rank_or_mpi_needs_no_address(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: name)
    for variables in ({}, {"HOROVOD_SIZE": "1"}, {"OMPI_COMM_WORLD_SIZE": "2"}):
        refuse_without_address(variables)
    if name == "localhost":
        refuse_without_address({"HOROVOD_SIZE": "2"})
    else:
        with pytest.raises(LaunchError, match=re.escape("127.0.1.1 nobody-knows-me.invalid")):
            refuse_without_address({"HOROVOD_SIZE": "2"})
