"""The hosts of a job: from ``-H``, a discovery script, or Slurm's lists."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping
from pathlib import Path

from hvdtrain.errors import LaunchError, UnreachableError
from hvdtrain.programs import run_program
from hvdtrain.runtime.environment import tasks_per_node

_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9._-]{0,63}@)?[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
_MOST_SLOTS = 4096
_SCRIPT_S = 30.0
LOCAL_NAMES = ("localhost", "127.0.0.1")

_MOST_NODES = 1 << 16  # most nodes of a list of Slurm

_ITEM = re.compile(r"[A-Za-z0-9._-]+|(?:[A-Za-z0-9._-]*\[[0-9,-]+\])+")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


def parse_hosts(text: str) -> dict[str, int]:
    """Parse ``a:4,b:4``: the slots of each host, in order.

    Errors: LaunchError for an invalid name, an invalid number or 0, or a host that is named twice.
    """
    hosts: dict[str, int] = {}
    for part in text.split(","):
        _add(hosts, part, part, f"-H {text!r}", least=1)
    return hosts


def parse_discovered(text: str, slots: int = 1) -> dict[str, int]:
    """Parse the output of a discovery script: a line ``host`` or ``host:slots`` per host; empty lines are skipped.

    `slots`: of a host without a number. Errors: LaunchError as of `parse_hosts`; 0 slots are allowed, for a host that
    must be vacated.
    """
    hosts: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        part = line.removesuffix("\r")
        if part.strip(" \t"):
            _add(hosts, part.strip(" \t"), part, f"line {number} of the discovery script", least=0, slots=slots)
    return hosts


def run_script(script: Path, timeout_s: float = _SCRIPT_S, *, slots: int = 1) -> dict[str, int]:
    """Run the script directly, without a shell; return the slots of each host: `slots` where it prints no number.

    Errors: LaunchError if it cannot be run, or prints an invalid host; UnreachableError if it takes too long, or fails.
    """
    expected = "a program that prints a line host or host:slots per host and exits with 0"
    try:
        code, out, err = run_program([str(script.absolute())], timeout_s)
    except TimeoutError:
        what = f"the discovery script {script} did not end within {timeout_s:.0f} s"
        raise UnreachableError(what, expected=expected) from None
    except OSError as error:
        what = f"the discovery script {script} cannot be run"
        raise LaunchError(what, expected=expected, found=str(error), next_step=_hint(script)) from None
    if code != 0:
        found = f"exit code {code}: {err.strip()[-500:]}"
        raise UnreachableError(f"the discovery script {script} failed", expected=expected, found=found)
    return parse_discovered(out, slots)


def _hint(script: Path) -> str:
    """Return the next step for a script that cannot be run."""
    words = str(script).split()
    if script.is_dir():
        return f"name the program itself; {script} is a folder"
    if not script.exists() and len(words) > 1:
        return "it runs without arguments: write the command into a script and give the path of that"
    if not script.exists():
        return f"give the path of an existing program, relative to {Path.cwd()}"
    if not os.access(script, os.X_OK):
        return f"chmod +x {script}"
    return "check that its first line names an existing interpreter, as in #!/bin/sh"


def _add(hosts: dict[str, int], part: str, found: str, where: str, *, least: int, slots: int = 1) -> None:
    name, colon, count = part.rpartition(":")
    name, count = (name, count) if colon else (part, str(slots))
    if not _NAME.fullmatch(name):
        raise LaunchError(
            f"{where} has an invalid host name",
            expected="letters, digits, '.', '-' and '_', not beginning with '-'; host or host:slots",
            found=repr(found),
            next_step="use a name that ssh accepts; for an IPv6 address a name in ~/.ssh/config or /etc/hosts",
        )
    if not re.fullmatch("[0-9]{1,4}", count) or not least <= int(count) <= _MOST_SLOTS:
        expected = f"a whole number from {least} to {_MOST_SLOTS} after the colon"
        raise LaunchError(f"{where} has an invalid number of slots", expected=expected, found=repr(found))
    if name in hosts:
        raise LaunchError(f"{where} names a host twice", expected="each host once, as host:slots", found=repr(name))
    hosts[name] = int(count)


def node_names(text: str) -> list[str]:
    """Return the names of a list of Slurm, such as ``n[01-04,7],m3-[1-2]``, in order.

    By https://slurm.schedmd.com/scontrol.html (show hostnames): a number keeps its leading zeros, and of several
    brackets the last varies fastest. No text follows the last bracket (scontrol of 22.05 prints no name then). Errors:
    LaunchError if the list is invalid.
    """
    names: list[str] = []
    for item in re.split(r",(?![^\[]*\])", text):
        if not _ITEM.fullmatch(item):
            raise _wrong(text, item)
        parts = [_numbers(text, part) if part[0] == "[" else [part] for part in re.findall(r"\[[^]]*\]|[^[]+", item)]
        for name in itertools.product(*parts):
            names.append("".join(name))
            if len(names) > _MOST_NODES:
                raise _wrong(text, item)
    return names


def slots_by_node(nodes: str, tasks: str) -> dict[str, int]:
    """Return the number of ranks per host of an allocation of Slurm.

    `nodes`: as in SLURM_JOB_NODELIST; `tasks`: as in SLURM_TASKS_PER_NODE, ``2(x3),1``. Errors: LaunchError if either
    is invalid, or their lengths differ.
    """
    names = node_names(nodes)
    try:
        counts = tasks_per_node(tasks)
    except ValueError:
        counts = []
    if len(counts) != len(names):
        raise LaunchError(
            "Slurm's task counts do not match its nodes",
            expected=f"a count for each of {nodes}, such as 2(x3),1",
            found=repr(tasks),
            next_step="give the hosts: -H a:2,b:2",
        )
    return dict(zip(names, counts, strict=True))


def slurm_slots(environ: Mapping[str, str], gpus_per_node: int, ranks: int) -> dict[str, int]:
    """Return the slots per host of this process's allocation of Slurm: its GPUs, else its tasks, else its cores.

    Cores are only a limit: an allocation without ``--ntasks`` does not say how many ranks it is for. Variables:
    https://slurm.schedmd.com/sbatch.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES

    `gpus_per_node`, `ranks`: as asked for; 0 if not. Errors: LaunchError if the allocation has several components, or
    does not say how many ranks it is for.
    """
    if "SLURM_HET_SIZE" in environ:
        raise LaunchError(
            "this is a heterogeneous job of Slurm: its components differ in nodes and ranks",
            expected="an allocation with one component",
            found=f"SLURM_HET_SIZE={environ['SLURM_HET_SIZE']}",
            next_step="ask for it without ':' in salloc or sbatch; or start on named hosts: --to hvdtrain -H a:4,b:2",
        )
    nodes = environ["SLURM_JOB_NODELIST"]
    names = node_names(nodes)
    gpus = gpus_per_node or allocated_gpus(environ)
    if gpus and ranks <= gpus * len(names):
        return dict.fromkeys(names, gpus)
    in_step = "SLURM_STEP_ID" in environ  # then these are the step's tasks, such as the one of ``srun --pty bash``
    if environ.keys() & {"SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"} and not (in_step and ranks):
        return slots_by_node(nodes, environ.get("SLURM_TASKS_PER_NODE", ""))
    if not ranks:
        raise LaunchError(
            "this allocation of Slurm does not say how many ranks it is for",
            expected="--ntasks, --ntasks-per-node or GPUs per node in salloc or sbatch",
            next_step="give it here: hvdtrain launch -np N",
        )
    return slots_by_node(nodes, environ.get("SLURM_JOB_CPUS_PER_NODE", ""))


def allocated_gpus(environ: Mapping[str, str]) -> int:
    """Return the GPUs of each node of this process's allocation of Slurm; 0 if none.

    By ``--gpus-per-node``, such as ``a100:4``, else those of this node.
    """
    text = environ.get("SLURM_GPUS_PER_NODE") or environ.get("SLURM_GPUS_ON_NODE", "")
    count = text.rpartition(":")[2]
    return int(count) if re.fullmatch("[0-9]{1,3}", count) else 0


def _numbers(text: str, bracket: str) -> list[str]:
    numbers: list[str] = []
    for part in bracket[1:-1].split(","):
        found = _RANGE.fullmatch(part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if not found or not 0 <= last - first < _MOST_NODES:
            raise _wrong(text, bracket)
        numbers += [f"{number:0{len(found[1])}}" for number in range(first, last + 1)]
    return numbers


def _wrong(text: str, part: str) -> LaunchError:
    return LaunchError(
        "invalid list of hosts from Slurm",
        expected=f"such as n[01-04,7],m3-[1-2], of at most {_MOST_NODES} hosts",
        found=f"{part!r} in {text!r}" if part != text else repr(text),
        next_step="compare with the output of: scontrol show hostnames",
    )
