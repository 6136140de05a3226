"""What is to be run, as pure data, and the command lines and environments that follow from it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hvdtrain.launch.commands import Limits
from hvdtrain.runtime.environment import horovod_numbers

AGENT = "hvdtrain.launch.agent"

BOOT = (
    'import sys;sys.path[:1]=[];import json;hello=json.loads(sys.stdin.buffer.readline());sys.path[:0]=hello["path"];'
    "from {module} import main;sys.exit(main(hello))"
)
"""What Python runs on another host. Where to look for hvdtrain comes with the first message, by stdin."""

_PASSED = ("HVDTRAIN_", "HOROVOD_", "OMP_", "MKL_", "TORCH_", "GLOO_", "NCCL_", "PYTHON", "HF_", "TOKENIZERS_")
_FOREIGN = (
    "OMPI_",
    "PMIX_",
    "PMI_",
    "MPI_LOCAL",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "HOROVOD_RANK",
    "HOROVOD_SIZE",
)


@dataclass(frozen=True)
class Plan:
    """A job.

    Attributes:
        program: what each rank runs.
        limits: what it holds to.
        hosts: slots by host, where no script tells them.
        script: the discovery script.
        slots: of hosts that it names without a number.
        local: names of hosts that are this one.
        folder: where ranks work, on all hosts.
        environment: that of this process.
        python: this Python.
        path: folders of PYTHONPATH, for the agents of other hosts.
        pass_on: names of further variables that ranks on other hosts get as they are here.
        ssh_port, ssh_options: of ssh to other hosts; options are whole arguments.
        interface: by which ranks of different hosts reach each other; "" is found out.
        events: a file to which each event is appended as a line of JSON.
        tag: whether lines of rank 0 are marked too.
    """

    program: tuple[str, ...]
    limits: Limits
    hosts: Mapping[str, int]
    script: Path | None = None
    slots: int = 1
    local: frozenset[str] = frozenset({"localhost", "127.0.0.1"})
    folder: str = "."
    environment: Mapping[str, str] = field(default_factory=dict)
    python: str = "python3"
    path: tuple[str, ...] = ()
    pass_on: tuple[str, ...] = ()
    ssh_port: int | None = None
    ssh_options: tuple[str, ...] = ()
    interface: str = ""
    events: Path | None = None
    tag: bool = False


def agent_command(plan: Plan, host: str) -> list[str]:
    """What starts the agent of a host."""
    if host in plan.local:
        return [plan.python, "-m", AGENT]
    return ssh_command(host, AGENT, plan.python, plan.ssh_port, plan.ssh_options)


def ssh_command(host: str, module: str, python: str, ssh_port: int | None, ssh_options: Sequence[str]) -> list[str]:
    """What runs `main` of a module of ours on another host: `main` gets the first line of stdin, read as JSON."""
    port = ["-p", str(ssh_port)] if ssh_port else []
    options = ["-T", "-o", "BatchMode=yes", *port, *ssh_options, "-o", "ServerAliveInterval=5"]  # the first wins
    return ["ssh", *options, "--", host, f"exec {shlex.join([python, '-c', BOOT.format(module=module)])}"]


def hello_message(plan: Plan, host: str) -> dict[str, object]:
    """The first message to the agent of a host."""
    remote = host not in plan.local
    names = {*passed_variables(plan.environment), *plan.pass_on} if remote else set()
    variables = {k: v for k, v in plan.environment.items() if k in names}
    return {"host": host, "folder": plan.folder, "environment": variables, "remote": remote, "path": list(plan.path)}


def passed_variables(environment: Mapping[str, str]) -> list[str]:
    """Names of the variables that ranks on other hosts get without being asked for: those of the libraries they use."""
    names = [name for name in environment if name.startswith(_PASSED) and not name.startswith(_FOREIGN)]
    return [name for name in names if re.fullmatch("[A-Za-z0-9_]+", name)]


def agent_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """That of an agent on this host, and so of its ranks: without what other launchers left."""
    return {k: v for k, v in environment.items() if not k.startswith(_FOREIGN)}


def rank_environment(plan: Plan, host: str, place: Mapping[str, int]) -> dict[str, str]:
    """What a rank's environment gets besides its host's; each round overwrites the numbers."""
    given = {"PYTHONUNBUFFERED": "1"} if "PYTHONUNBUFFERED" not in plan.environment else {}
    return {
        **given,
        **horovod_numbers(place),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_ELASTIC": "1",
        "HOROVOD_HOSTNAME": host,
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(plan.limits.gloo_timeout(place["size"])),
    }


def describe_plan(plan: Plan, hosts: Mapping[str, int]) -> str:
    """What would be run, for ``--dry-run``."""
    lines = []
    for host, slots in hosts.items():
        lines.append(f"{host}: up to {slots} rank(s), by its agent")
        lines.append(f"  {shlex.join(agent_command(plan, host))}")
    host, slots = next(iter(hosts.items()), ("localhost", 1))
    place = {"rank": 0, "size": plan.limits.start, "local_rank": 0, "local_size": min(plan.limits.start, slots)}
    variables = rank_environment(plan, host, {**place, "cross_rank": 0, "cross_size": len(hosts)})
    lines.append(f"each rank, in {shlex.quote(plan.folder)}, the first with:")
    lines.append(f"  {shlex.join(plan.program)}")
    lines += [f"  {name}={shlex.quote(text)}" for name, text in variables.items()]
    return "\n".join(lines)


def python_path(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The folders of PYTHONPATH, each in full."""
    return tuple(str(Path(part).absolute()) for part in environment.get("PYTHONPATH", "").split(":") if part)
