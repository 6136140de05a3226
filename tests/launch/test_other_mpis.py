"""Horovod built on MPICH trains under MPICH's mpirun and, as they share a binary interface, under Intel's."""

from __future__ import annotations

import os
import site
import subprocess
from pathlib import Path

import pytest

from hvdtrain.launch.spec import Command, JobSpec, Mpi
from hvdtrain.launch.targets import TARGETS
from hvdtrain.observe.past_journal import read_steps
from tests.support.launch import ENVIRONMENT, ROOT, train
from tests.support.mpis import wheel

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("builds")]

TOY = (f"--task={ROOT}/tests/support/toy.py:toy", "--train.steps=6", "--run_dir=run")


@pytest.fixture(scope="module")
def on_mpich() -> Mpi:
    """MPICH's environment, in which this one's packages are seen and Horovod is built for that MPI."""
    mpi = wheel("mpich")
    assert mpi.prefix is not None
    python = Path(mpi.prefix) / "bin" / "python"
    asked = subprocess.run(
        [python, "-c", "import site; print(site.getsitepackages()[0])"], capture_output=True, text=True
    )
    (Path(asked.stdout.strip()) / "lend.pth").write_text("\n".join(site.getsitepackages()))
    path = os.pathsep.join([str(python.parent), ENVIRONMENT["PATH"]])
    # Without optimization it takes less time; so it is not kept where users have theirs.
    quick = {"HOROVOD_DEBUG": "1", "XDG_CACHE_HOME": str(ROOT / "build/quick")}
    variables = {**ENVIRONMENT, "PATH": path, "PYTHONPATH": str(ROOT), **quick}
    done = subprocess.run([python, "-m", "hvdtrain", "build-horovod"], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return mpi


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["mpich", "intelmpi"])
def test_horovod_trains(name: str, on_mpich: Mpi, tmp_path: Path) -> None:
    mpi = on_mpich if name == "mpich" else wheel(name)
    start = TARGETS[mpi.flavour].render(JobSpec(TOY, 2, python=f"{on_mpich.prefix}/bin/python", mpi=mpi))
    assert isinstance(start, Command)
    path = os.pathsep.join([str(Path(mpi.mpirun).parent), ENVIRONMENT["PATH"]])
    given = {**ENVIRONMENT, **start.variables, "PATH": path, "PYTHONPATH": str(ROOT)}
    if name == "intelmpi":
        given["LD_LIBRARY_PATH"] = f"{mpi.prefix}/lib"
    done = subprocess.run(start.argv, cwd=tmp_path, env=given, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    alone = tmp_path / "alone"
    alone.mkdir()
    train(*TOY, cwd=alone)
    losses = [
        [line["loss"] for line in read_steps(folder / "run/journal.jsonl").values()] for folder in (tmp_path, alone)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and len(losses[0]) == 6
