"""The plan of a job for hvdtrain's own driver, as pure data, and the command lines and environments from it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hvdtrain.launch.agent_starter import SSH, Starter
from hvdtrain.launch.commands import Limits
from hvdtrain.launch.hosts import LOCAL_NAMES
from hvdtrain.launch.spec import JobSpec
from hvdtrain.launch.targets.base import network_variables
from hvdtrain.launch.variables import agent_environment, passed_variables, step_environment
from hvdtrain.runtime.environment import horovod_numbers

AGENT = "hvdtrain.launch.agent"

BOOT = (
    'import sys;sys.path[:1]=[];import json;hello=json.loads(sys.stdin.buffer.readline());sys.path[:0]=hello["path"];'
    "from {module} import main;sys.exit(main(hello))"
)
"""Python code for another host. The first message, by stdin, has the folders in which to look for hvdtrain."""


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
        return plan.starter.command(host, plan.job.python, BOOT.format(module=AGENT), plan.job.interface)
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
