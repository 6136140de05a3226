"""The command lines of the MPI targets, run by the real launchers over ssh on two hosts."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hvdtrain.launch.spec import Command, JobSpec
from hvdtrain.launch.targets import TARGETS
from tests.launch.test_real_mpis import AWKWARD, told
from tests.support.echo_python import echo_python
from tests.support.mpis import NAMES, any_of
from tests.support.two_hosts import LINK, TwoHosts, variables

VALUES = {"PLAIN": "plain", "AWKWARD": 'two\nlines; it\'s "a b", $HOME,=ü \\', "EMPTY": "", "HF_TOKEN": "a secret"}


@pytest.mark.parametrize("name", NAMES)
def test_ranks_of_both_hosts_get_their_arguments(name: str, hosts: TwoHosts, tmp_path: Path) -> None:
    mpi = any_of(name)
    folder = tmp_path / "it's a folder"
    folder.mkdir()
    job = JobSpec(
        AWKWARD,
        4,
        nodes=2,
        hosts={"a": 2, "b": 2},
        python=echo_python(folder),
        folder=str(folder),
        pass_on=("PATH", "TOLD_NAMES", *VALUES),
        interface=LINK,
        ssh_options=("-o", "ServerAliveInterval=5"),
        mpi=mpi,
        is_root=True,
    )
    start = TARGETS[mpi.flavour].render(job)
    assert isinstance(start, Command)
    assert not any(value and value in word for word in start.argv for value in VALUES.values())
    path = os.pathsep.join([str(Path(mpi.mpirun).parent), variables()["PATH"]])
    given = {
        **VALUES,
        **start.variables,
        "PATH": path,
        "TOLD_NAMES": json.dumps(list(VALUES)),
        "LAST": "MPICH loses it",
    }
    done = hosts.a.run(start.argv, cwd=folder, environment=given)
    lines = told(done.stdout)
    found = [(line["host"], line["rank"], line["size"], line["local_rank"]) for line in lines]
    assert found == [("a", 0, 4, 0), ("a", 1, 4, 1), ("b", 2, 4, 0), ("b", 3, 4, 1)]
    assert all(line["argv"] == ["-m", "hvdtrain", *AWKWARD] and line["cwd"] == str(folder) for line in lines)
    assert [line["variables"] for line in lines] == [VALUES] * 4


@pytest.mark.parametrize(
    ("target", "name"),
    [("openmpi", "openmpi4"), ("openmpi", "openmpi5"), ("horovodrun", "openmpi4"), ("horovodrun", None)],
)
def test_horovod_trains_on_both_hosts(target: str, name: str | None, hosts: TwoHosts, tmp_path: Path) -> None:
    """Open MPI 5's library serves a Horovod that was built on version 4. horovodrun without MPI goes over Gloo."""
    mpi = any_of(name) if name else None
    root = Path(__file__).parents[2]
    toy = (f"--task={root}/tests/support/toy.py:toy", "--train.steps=5", "--run_dir=run")
    job = JobSpec(toy, 2, nodes=2, hosts={"a": 1, "b": 1}, python=sys.executable, mpi=mpi, is_root=True, interface=LINK)
    start = TARGETS[target].render(replace(job, pass_on=("PATH", "PYTHONPATH", "OMP_NUM_THREADS")))
    assert isinstance(start, Command)
    path = os.pathsep.join([*([str(Path(mpi.mpirun).parent)] if mpi else []), variables()["PATH"]])
    given = {**start.variables, "PATH": path, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = hosts.a.run(start.argv, cwd=tmp_path, environment=given)
    assert "finished at step 5 of 5" in done.stdout and "on 2 rank(s)" in done.stdout
