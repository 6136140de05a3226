"""Agents on other hosts by the scheduler of an allocation, with fakes of the programs."""

from __future__ import annotations

import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from hvdtrain.errors import LaunchError
from hvdtrain.launch import agent_link as link
from hvdtrain.launch.agent_link import AgentLink
from hvdtrain.launch.job import Limits
from hvdtrain.launch.spec import JobSpec
from hvdtrain.launch.worker_plan import (
    Starter,
    WorkerPlan,
    agent_command,
    find_starter,
    gpus_by_node,
    starting_environment,
)
from tests.support.fake_launch import FakeJob
from tests.support.launch import TIMEOUT_S

IN_PBS = {"PBS_JOBID": "7.server", "PBS_NODEFILE": "nodes"}
IN_LSF = {"LSB_JOBID": "7", "LSB_DJOB_HOSTFILE": "nodes"}
NODES = {"a": "a.site", "b": "b.site"}
PLAN = WorkerPlan(JobSpec((), 2, python="/venv/bin/python"), ("true",), Limits(2, 1, 2), {"a": 1, "b": 1})

FAKE = """\
#!/bin/sh
# What the manuals say: {name} NODE COMMAND ARGUMENTS, without a shell; blaunch with -no-shell.
{take}
node=$1; shift
[ "$node" = b.site ] && [ "$2" = -c ] && [ $# -ge 3 ] || {{ echo "{name}: wrong arguments: $*" >&2; exit 255; }}
echo "$node" >> called
{run}
"""


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on PATH with programs that run commands here, and a file with the names of two nodes."""
    folder = tmp_path / "bin"
    folder.mkdir()
    no_shell = '[ "$1" = -no-shell ] || { echo "a shell reads the command" >&2; exit 255; }; shift'
    (folder / "blaunch").write_text(FAKE.format(name="blaunch", take=no_shell, run='exec "$@"'))
    (folder / "blaunch").chmod(0o755)
    (tmp_path / "nodes").write_text("a.site\nb.site\nb.site\n")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return folder


def test_a_job_in_an_allocation_starts_agents_by_its_scheduler(
    fakes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that dies is replaced; in the end nothing is left."""
    for name, value in IN_LSF.items():
        monkeypatch.setenv(name, value)
    options = ["-H", "localhost:1,b.site:1", "-np", "2", "--elastic", "1:2", "--interface", "lo"]
    with FakeJob(tmp_path, *options, "--", "1000000", "kill:1:5") as job:
        job.until("round 1: 2 rank(s) on 2 host(s)")
        job.until("round 3: 2 rank(s) on 2 host(s)")
        job.signal(signal.SIGTERM)
        code, _ = job.end()
    assert code == 128 + signal.SIGTERM and (tmp_path / "called").read_text() == "b.site\n"
    assert any("agents on other hosts by blaunch" in line for line in job.said)


def test_a_step_has_all_of_its_node_and_no_options_of_other_steps() -> None:
    plan = replace(PLAN, starter=Starter("srun", NODES, {"b.site": 3}))
    command = agent_command(plan, "b.other.domain")
    assert command[:6] == ["srun", "--overlap", "--nodes=1", "--ntasks=1", "--nodelist=b.site", "--gpus=3"]
    assert {"--mem=0", "--cpu-bind=none", "--mpi=none"} < set(command) and "--exact" not in command
    assert not any("--gpus" in word for word in agent_command(plan, "a")), "none in this job there"
    around = {"SLURM_JOB_ID": "7", "SLURM_CONF": "f", "SLURM_GPUS_PER_TASK": "1", "SRUN_CPUS_PER_TASK": "2", "X": "y"}
    around |= {"SLURM_LABELIO": "1"}
    plan = replace(plan, environment=around)
    assert starting_environment(plan, "b") == {"SLURM_JOB_ID": "7", "SLURM_CONF": "f", "X": "y"}
    assert starting_environment(plan, "localhost") == around


def test_hosts_outside_of_the_allocation_are_reached_by_ssh() -> None:
    plan = replace(PLAN, starter=Starter("srun", NODES))
    assert agent_command(plan, "c")[0] == agent_command(plan, "me@b")[0] == "ssh"
    assert agent_command(replace(plan, starter=Starter("srun", NODES, forced=True)), "c")[0] == "srun"


def test_the_scheduler_is_found_where_its_program_is(fakes: Path) -> None:
    path = str(fakes)
    found = find_starter("auto", IN_LSF, path)
    assert (found.by, dict(found.nodes)) == ("blaunch", NODES) and list(found.names_of(["a", "c"])) == ["a.site"]
    found = find_starter("auto", IN_PBS, path)
    assert found.by_for("b") == "ssh" and list(found.names_of(["a"])) == ["a.site"]
    assert find_starter("auto", {"SLURM_JOB_ID": "7"}, path).by == "ssh", "no srun"
    (fakes / "srun").symlink_to("/bin/false")
    found = find_starter("auto", {"SLURM_JOB_ID": "7"}, path)
    assert (found.by, found.by_for("b")) == ("srun", "ssh"), "its nodes are unknown"
    (fakes / "srun").unlink()
    assert find_starter("ssh", IN_LSF, path).by_for("b") == "ssh"
    for asked, inside in (("srun", {"SLURM_JOB_ID": "7"}), ("blaunch", IN_PBS)):
        with pytest.raises(LaunchError, match="only inside an allocation of"):
            find_starter(asked, inside, path)


@pytest.mark.parametrize(
    ("shown", "gpus"),
    [
        (" Nodes=a CPU_IDs=0 Mem=0 GRES=gpu:3(IDX:0-2)   Nodes=b CPU_IDs=0 Mem=0 GRES=gpu:1(IDX:0)", {"a": 3, "b": 1}),
        (" Nodes=n[1-2] CPU_IDs=0-7 Mem=9 GRES=gpu:a100:4(IDX:0-3),gpu:t4:1(IDX:4) Min", {"n1": 5, "n2": 5}),
        (" Nodes=a CPU_IDs=0-2 Mem=0 GRES= MinCPUsNode=1", {"a": 0}),
        ("slurm_load_jobs error", {}),
    ],
)  # fmt: skip
def test_gpus_of_each_node_are_read(shown: str, gpus: dict[str, int]) -> None:
    assert gpus_by_node(shown) == gpus


def test_an_agent_that_ends_at_once_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its output has ended before all threads are started."""

    class Eager(threading.Thread):
        def __init__(self, target: Any, **others: Any) -> None:
            super().__init__(target=target, **others)
            self.reads = target.__name__ == "_read"

        def start(self) -> None:
            super().start()
            if self.reads:
                self.join()

    monkeypatch.setattr(link.threading, "Thread", Eager)
    heard: SimpleQueue[tuple[AgentLink, dict[str, Any]]] = SimpleQueue()
    agent = AgentLink("a", [sys.executable, "-c", "import sys; sys.exit('no such host')"], {}, heard.put)
    agent.start()
    assert heard.get(timeout=TIMEOUT_S)[1] == {"type": "gone", "why": "no such host"}
    agent.close()
    agent.wait()
