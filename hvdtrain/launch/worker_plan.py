"""The plan of a job for hvdtrain's own driver; the command lines and environments of its agents and ranks.

Agents on other hosts start by ssh, or inside an allocation by its scheduler, as many sites forbid ssh there:

- ``srun``: a step that shares the cores, memory and GPUs of its node with other steps. Options from
  https://slurm.schedmd.com/srun.html. Without ``--exact`` a step has all cores that the job has on its node. GPUs must
  be requested: a step of one node cannot have all GPUs of ``salloc --gpus=8``, and has only one of
  ``--gpus-per-task=1``. With ``--gpus=N`` it has those of its node in each case (tested with Slurm 22.05).
- ``blaunch`` of LSF forwards stdin and stdout as ssh does, and without ``-no-shell`` a shell reads the command:
  https://www.ibm.com/docs/en/spectrum-lsf/10.1.0?topic=reference-blaunch

``pbs_tmrsh`` of PBS forwards neither stdin nor stdout, so agents start by ssh there.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hvdtrain.errors import LaunchError
from hvdtrain.launch.choose import AUTO
from hvdtrain.launch.hosts import LOCAL_NAMES, node_names
from hvdtrain.launch.job import Limits
from hvdtrain.launch.spec import JobSpec
from hvdtrain.launch.targets.base import network_variables
from hvdtrain.launch.variables import agent_environment, passed_variables, step_environment
from hvdtrain.programs import run_program
from hvdtrain.runtime.environment import horovod_numbers

SSH = "ssh"
JOBS: Mapping[str, tuple[str, str]] = {"srun": ("Slurm", "SLURM_JOB_ID"), "blaunch": ("LSF", "LSB_JOBID")}
"""Programs that start agents: their scheduler, and the variable that is set inside its allocations."""

_FILES = ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE")  # variables that name a file with one line per slot of an allocation

_SCONTROL_S = 30.0
_NODES = re.compile(r" Nodes=(\S+) CPU_IDs=\S* Mem=\S* GRES=(\S*)")
_GPUS = re.compile(r"\bgpu:(?:[^:(,]*:)?([0-9]{1,4})")

AGENT = "hvdtrain.launch.agent"

BOOT = (
    'import sys;sys.path[:1]=[];import json;hello=json.loads(sys.stdin.buffer.readline());sys.path[:0]=hello["path"];'
    "from {module} import main;sys.exit(main(hello))"
)
"""Python code for another host. The first message, by stdin, has the folders in which to look for hvdtrain."""


@dataclass(frozen=True)
class Starter:
    """How agents start on the hosts of an allocation; on others they start by ssh."""

    by: str = SSH
    nodes: Mapping[str, str] = field(default_factory=dict)  # the scheduler's name of each node by its short name
    gpus: Mapping[str, int] = field(default_factory=dict)  # of the job on a node, for srun
    forced: bool = False  # whether the user asked for this way, so that ssh is never used

    def names_of(self, hosts: Iterable[str]) -> list[str]:
        """Return the scheduler's names of those hosts that are nodes of the allocation."""
        return [self.nodes[short] for short in map(short_name, hosts) if short in self.nodes]

    def by_for(self, host: str) -> str:
        """Return the program that starts the agent of a host."""
        return self.by if self.forced or short_name(host) in self.nodes else SSH

    def command(self, host: str, python: str, code: str) -> list[str]:
        """Return the command that runs Python code on a host of the allocation, with stdin and stdout."""
        node = self.nodes.get(short_name(host), host)
        argv = [python, "-c", code]
        if self.by == "srun":
            gpus = [f"--gpus={self.gpus[node]}"] if self.gpus.get(node) else []
            where = ["--nodes=1", "--ntasks=1", f"--nodelist={node}"]
            return ["srun", "--overlap", *where, *gpus, "--mem=0", "--cpu-bind=none", "--mpi=none", *argv]
        return ["blaunch", "-no-shell", node, *argv]


def short_name(host: str) -> str:
    """Return a host's name without its domain. Of an IP address it is no name of a host."""
    return host.partition(".")[0]


def allocation_slots(environ: Mapping[str, str]) -> list[str]:
    """Return the lines of the file with a line per slot of an allocation of PBS or LSF; none outside of them."""
    file = next((environ[name] for name in _FILES if name in environ), None)
    return Path(file).read_text().split() if file else []


def find_starter(asked: str, environ: Mapping[str, str], path: str) -> Starter:
    """Find how agents start. `asked`: the value of ``--agents``; `path`: where programs are looked for.

    Errors: LaunchError if not inside an allocation of that scheduler, or its program is missing.
    """
    if asked == SSH:
        return Starter(forced=True)
    inside = [by for by, (_, job) in JOBS.items() if job in environ and shutil.which(by, path=path)]
    if asked != AUTO and asked not in inside:
        scheduler, job = JOBS[asked]
        missing = f"{job} is not set" if job not in environ else f"there is no {asked} on PATH"
        raise LaunchError(
            f"--agents {asked} works only inside an allocation of {scheduler}",
            expected=f"{job} in the environment, and {asked} on PATH",
            found=missing,
            next_step="start it in a batch script or an interactive job; or by ssh: --agents ssh",
        )
    by = asked if asked != AUTO else next(iter(inside), SSH)
    in_slurm = by == "srun"
    nodes = environ.get("SLURM_JOB_NODELIST")
    names = (node_names(nodes) if nodes else []) if in_slurm else allocation_slots(environ)
    return Starter(by, {short_name(name): name for name in names}, _gpus(environ) if in_slurm else {}, asked != AUTO)


def _gpus(environ: Mapping[str, str]) -> dict[str, int]:
    """Return the GPUs of this job on each node; none where scontrol does not answer."""
    job, array = environ["SLURM_JOB_ID"], environ.get("SLURM_ARRAY_JOB_ID")  # of an array, its job alone
    name = f"{array}_{environ.get('SLURM_ARRAY_TASK_ID', '')}" if array else job
    argv = ["scontrol", "--details", "--oneliner", "show", "job", name]
    try:
        return gpus_by_node(run_program(argv, _SCONTROL_S).out)
    except OSError:
        return {}


def gpus_by_node(shown: str) -> dict[str, int]:
    """Parse the GPUs on each node from ``scontrol --details --oneliner show job``."""
    found: dict[str, int] = {}
    for nodes, gres in _NODES.findall(shown):
        found |= dict.fromkeys(node_names(nodes), sum(map(int, _GPUS.findall(gres))))
    return found


@dataclass(frozen=True)
class WorkerPlan:
    """A job, as our own driver runs it."""

    job: JobSpec
    program: tuple[str, ...]  # command of each rank
    limits: Limits
    hosts: Mapping[str, int]  # slots by host, without a discovery script
    slots: int = 1  # of a host that the discovery script lists without a number
    local: frozenset[str] = frozenset(LOCAL_NAMES)  # names of this host
    environment: Mapping[str, str] = field(default_factory=dict)  # of this process
    pass_on: tuple[str, ...] = ()  # names of additional variables for ranks on other hosts
    events: Path | None = None  # a file for the event log
    tag: bool = False  # whether lines of rank 0 are tagged too
    starter: Starter = field(default_factory=Starter)  # how agents on other hosts are started
    address: str = ""  # an address of this host that other hosts reach, "" if none is known


def agent_command(plan: WorkerPlan, host: str) -> list[str]:
    """Return the command that starts the agent of a host."""
    if host in plan.local:
        return [plan.job.python, "-m", AGENT]
    if plan.starter.by_for(host) != SSH:
        return plan.starter.command(host, plan.job.python, BOOT.format(module=AGENT))
    return ssh_command(host, AGENT, plan.job.python, plan.job.ssh_arguments)


def starting_environment(plan: WorkerPlan, host: str) -> dict[str, str]:
    """Return the environment of the command that starts the agent of a host."""
    in_step = host not in plan.local and plan.starter.by_for(host) == "srun"
    return (step_environment if in_step else agent_environment)(plan.environment)


def ssh_command(host: str, module: str, python: str, ssh_arguments: Sequence[str]) -> list[str]:
    """Return the command that runs a module's `main` on another host; `main` gets the first line of stdin, as JSON."""
    options = ["-T", "-o", "BatchMode=yes", *ssh_arguments, "-o", "ServerAliveInterval=5"]  # the first wins
    return ["ssh", *options, "--", host, f"exec {shlex.join([python, '-c', BOOT.format(module=module)])}"]


def hello_message(plan: WorkerPlan, host: str) -> dict[str, object]:
    """Return the first message to the agent of a host."""
    remote = host not in plan.local
    names = {*passed_variables(plan.environment), *plan.pass_on} if remote else set()
    variables = {k: v for k, v in plan.environment.items() if k in names}
    given = {"host": host, "folder": plan.job.folder, "environment": variables, "remote": remote}
    return {**given, "path": list(python_path(plan.environment)), "driver": plan.address}


def rank_environment(plan: WorkerPlan, host: str, place: Mapping[str, int]) -> dict[str, str]:
    """Return the variables of a rank on top of its host's; each round overwrites the numbers."""
    given = {"PYTHONUNBUFFERED": "1"} if "PYTHONUNBUFFERED" not in plan.environment else {}
    return {
        **given,
        **network_variables(plan.job),
        **horovod_numbers(place),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_ELASTIC": "1",
        "HOROVOD_HOSTNAME": host,
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(plan.limits.gloo_timeout(place["size"])),
    }


def describe_plan(plan: WorkerPlan, hosts: Mapping[str, int]) -> str:
    """Describe what would run, for ``--dry-run``."""
    lines = []
    for host, slots in hosts.items():
        lines.append(f"{host}: up to {slots} rank(s), by its agent")
        lines.append(f"  {shlex.join(agent_command(plan, host))}")
    host, slots = next(iter(hosts.items()), ("localhost", 1))
    place = {"rank": 0, "size": plan.limits.start, "local_rank": 0, "local_size": min(plan.limits.start, slots)}
    variables = rank_environment(plan, host, {**place, "cross_rank": 0, "cross_size": len(hosts)})
    lines.append(f"each rank, in {shlex.quote(plan.job.folder)}, the first with:")
    lines.append(f"  {shlex.join(plan.program)}")
    shown = {**plan.job.site_variables, **variables}
    lines += [f"  {name}={shlex.quote(text)}" for name, text in shown.items()]
    return "\n".join(lines)


def python_path(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the absolute folders of PYTHONPATH."""
    return tuple(str(Path(part).absolute()) for part in environment.get("PYTHONPATH", "").split(":") if part)
