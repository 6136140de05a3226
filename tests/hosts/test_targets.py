"""The command lines of the MPI targets, run by the real launchers over ssh on two hosts; what ranks there know."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hvdtrain.launch.spec import Command, JobSpec
from hvdtrain.launch.targets import TARGETS
from tests.launch.test_real_mpis import AWKWARD, told
from tests.support.echo_python import echo_python
from tests.support.journals import read_losses
from tests.support.launch import ROOT
from tests.support.mpis import NAMES, any_of
from tests.support.thread_job import train_on_threads
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
    toy = (f"--task={ROOT}/tests/support/toy.py:toy", "--train.global_batch=9", "--train.micro_batch=2")
    toy += ("--train.steps=5", "--run_dir=run")
    job = JobSpec(toy, 2, nodes=2, hosts={"a": 1, "b": 1}, python=sys.executable, mpi=mpi, is_root=True, interface=LINK)
    start = TARGETS[target].render(replace(job, pass_on=("PATH", "PYTHONPATH", "OMP_NUM_THREADS")))
    assert isinstance(start, Command)
    path = os.pathsep.join([*([str(Path(mpi.mpirun).parent)] if mpi else []), variables()["PATH"]])
    given = {**start.variables, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = hosts.a.run(start.argv, cwd=tmp_path, environment=given)
    assert "on 2 rank(s)" in done.stdout
    train_on_threads(*toy[:-1], f"--run_dir={tmp_path / 'alone'}", size=1)
    losses, alone = (read_losses(tmp_path / name) for name in ("run", "alone"))
    assert losses == pytest.approx(alone, rel=2e-6) and len(losses) == 5


WHO = """
import json, platform, sys
from pathlib import Path
from hvdtrain.runtime.tuning import prepare
info, choices = prepare()
from hvdtrain.comm.rounds import start_comm
import torch
comm = start_comm(info)
summed = torch.ones(1_000_000)
comm.allreduce(summed, name="x").wait()
facts = {"host": platform.node(), "size": comm.size, "local_size": comm.local_size, "one_host": info.one_host}
facts["set"] = [choice.setting.variable for choice in choices if choice.applied]
Path(sys.argv[1], str(comm.rank)).write_text(json.dumps({**facts, "sum": float(summed[0])}))
"""


@pytest.mark.parametrize("launch", [TwoHosts.mpirun, TwoHosts.horovodrun])
def test_ranks_know_that_they_are_on_two_hosts(launch: Callable[..., object], hosts: TwoHosts, tmp_path: Path) -> None:
    before = hosts.a.sent_bytes(), hosts.b.received_bytes()
    launch(hosts, [sys.executable, "-c", WHO, str(tmp_path)], cwd=ROOT, environment={"PYTHONPATH": str(ROOT)})
    a, b = (json.loads((tmp_path / str(rank)).read_text()) for rank in (0, 1))
    assert [a["host"], b["host"]] == ["a", "b"]
    for rank in (a, b):
        assert (rank["size"], rank["local_size"], rank["one_host"], rank["sum"]) == (2, 1, False, 2.0)
        assert "OMPI_MCA_coll_tuned_allreduce_algorithm" not in rank["set"]
    assert a["set"] == b["set"]
    assert hosts.a.sent_bytes() - before[0] > 4_000_000  # the tensor went by the link, not by shared memory
    assert hosts.b.received_bytes() - before[1] > 4_000_000
