"""Our own driver inside an allocation of a real Slurm whose nodes have no ssh server."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support import chaos
from tests.support.chaos import Cell, run_cell
from tests.support.fake_launch import job_processes
from tests.support.host import command_of, required
from tests.support.launch import ROOT, TIMEOUT_S
from tests.support.slurm import Slurm, slurm_on
from tests.support.two_hosts import LINK, two_hosts

FAKE = [str(ROOT / "tests/support/fake_launch.py"), str(ROOT / "tests/support/fake_rank.py")]
SHOW = "echo $(hostname) gpus=$CUDA_VISIBLE_DEVICES procid=$SLURM_PROCID tasks=$SLURM_STEP_NUM_TASKS"
FABRIC = ["ip", "link", "add", "link", LINK, "name", "ib0", "type", "macvlan", "mode", "bridge"]


@pytest.fixture(scope="module")
def without_ssh() -> Iterator[Slurm]:
    """Two nodes that ssh cannot reach. Each has a fast interface, and a bridge for containers at the same address."""
    with required(), two_hosts() as hosts:
        for host, number in ((hosts.a, 1), (hosts.b, 2)):
            host.end({pid for pid in host.processes() if command_of(pid)[:1] and "sshd" in command_of(pid)[0]})
            host.configure(*FABRIC)
            host.configure("ip", "link", "add", "docker0", "type", "bridge")
            for name, address in (("ib0", f"10.79.0.{number}/24"), ("docker0", "172.17.0.1/16")):
                host.configure("ip", "address", "add", address, "dev", name)
                host.configure("ip", "link", "set", name, "up")
        with slurm_on([hosts.a, hosts.b]) as started:
            yield started


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    return chaos.undisturbed(tmp_path_factory.mktemp("undisturbed"))


def test_training_on_two_nodes_survives_a_killed_rank(
    without_ssh: Slurm, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    """The loss curve is that of one process."""
    outcome = run_cell(Cell("SIGKILL", "exchange", size=4, rank=3), tmp_path, undisturbed, without_ssh)
    assert not outcome.faults, outcome.said
    assert outcome.sizes[:2] == [4, 3]
    assert "agents on other hosts by srun" in outcome.said and "round 1: 4 rank(s) on 2 host(s)" in outcome.said


@contextmanager
def job(slurm: Slurm, folder: Path) -> Iterator[tuple[subprocess.Popen[str], Iterator[str]]]:
    """Two ranks that never end, one on each node, once they have met; and the lines of the driver from then on."""
    launch = [sys.executable, *FAKE, "-np", "2", "--elastic", "1:2", "--", "1000000"]
    argv = ["salloc", "--quiet", "--nodes=2", "--ntasks=2", *launch]
    given = {**slurm.variables, "PYTHONPATH": str(ROOT), "FAKE_FOLDER": str(folder)}
    pipe = subprocess.PIPE
    with slurm.first.popen(argv, cwd=folder, environment=given, stdout=pipe, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        said = iter(process.stdout.readline, "")
        try:
            next(line for line in said if "round 1: 2 rank(s) on 2 host(s)" in line)
            yield process, said
        finally:
            slurm.clear()  # which leaves the command of salloc alone
            for one in driver(slurm, folder):
                one.kill()


def driver(slurm: Slurm, folder: Path) -> list[psutil.Process]:
    found = job_processes(folder, FAKE[0], slurm.first.processes())
    return [p for p in found if p.cmdline()[0] == sys.executable]


def test_a_killed_agent_loses_its_host_which_comes_back(without_ssh: Slurm, tmp_path: Path) -> None:
    """Ranks use the fast interface, and a bridge at the same address on each host never."""
    b = without_ssh.hosts[1]
    with job(without_ssh, tmp_path) as (process, said):
        (agent,) = job_processes(tmp_path, "hvdtrain.launch.agent", b.processes())
        agent.kill()
        lost = next(line for line in said if "b is lost" in line)
        assert "srun: error: b: task 0: Killed" in lost
        next(line for line in said if "round 2: 1 rank(s)" in line)
        next(line for line in said if "round 3: 2 rank(s) on 2 host(s)" in line)
        (own,) = driver(without_ssh, tmp_path)
        own.send_signal(signal.SIGINT)
        process.communicate(timeout=TIMEOUT_S)
    assert not job_processes(tmp_path, ids=b.processes())
    log = (tmp_path / "log").read_text().splitlines()
    assert all("if=ib0" in line for line in log if line.startswith(("round 1", "round 3")))


@pytest.mark.parametrize("victim", ["driver", "srun"])
def test_nothing_is_left_where_the_link_breaks(victim: str, without_ssh: Slurm, tmp_path: Path) -> None:
    a, b = without_ssh.hosts
    with job(without_ssh, tmp_path) as (_, said):
        there = job_processes(tmp_path, "fake_rank", b.processes()) + job_processes(
            tmp_path, "hvdtrain.launch.agent", b.processes()
        )
        assert len(there) == 2
        if victim == "driver":
            (found,) = driver(without_ssh, tmp_path)
        else:  # which has a child to end the step without it
            found = next(p for p in job_processes(tmp_path, "--overlap", a.processes()) if p.cmdline()[0] == "srun")
        found.kill()
        if victim == "srun":
            next(line for line in said if "b is lost" in line)
        _, left = psutil.wait_procs(there, timeout=TIMEOUT_S)
    assert not left


@pytest.mark.parametrize(
    ("options", "gpus"),
    [
        (["--gpus=3"], "0"),
        (["--gpus-per-task=1", "--ntasks=4", "--ntasks-per-node=2"], "0,1"),
        (["--exclusive"], "0,1,2,3"),
        ([], ""),
    ],
)
def test_an_agent_sees_all_gpus_of_the_job_on_its_node(
    options: list[str], gpus: str, without_ssh: Slurm, tmp_path: Path
) -> None:
    """And ranks see nothing of the step in which it runs, which has one task."""
    launch = [sys.executable, "-m", "hvdtrain", "launch", "--to", "hvdtrain", "-np", "2", "-H", "a:1,b.x.org:1"]
    argv = ["salloc", "--quiet", "--nodes=2", "--ntasks=2", *options, *launch, "--", "sh", "-c", SHOW]
    done = without_ssh.run(argv, cwd=tmp_path, environment={"PYTHONPATH": str(ROOT)})
    assert f"[1] b gpus={gpus} procid= tasks=\n" in done.stdout
