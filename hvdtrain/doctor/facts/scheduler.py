"""Facts about the scheduler of this site: the default queue, and the hardware of its nodes.

Formats: sinfo(1) of Slurm 22.05; qstat(1B) and pbsnodes(8B) of OpenPBS 23; bparams(1) of LSF 10.1.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass

from hvdtrain.errors import LaunchError
from hvdtrain.launch.detect import search_path
from hvdtrain.launch.hosts import node_names
from hvdtrain.programs import output

_SINFO = ("sinfo", "--noheader", "--exact", "--format=%P|%c|%m|%G|%N")
_KIB = {"b": 1 / 1024, "kb": 1, "mb": 1 << 10, "gb": 1 << 20, "tb": 1 << 30}


@dataclass(frozen=True)
class Nodes:
    """Nodes of equal hardware."""

    names: tuple[str, ...]
    cpus: int = 0  # of each node, as the scheduler counts them
    memory_mib: int = 0  # of each node
    gpus: int = 0  # of each node
    queue: str = ""  # the partition of Slurm; "" for nodes of all queues


@dataclass(frozen=True)
class Scheduler:
    """The scheduler."""

    target: str = ""  # of ``--to``; "" if there is none
    source: str = ""  # the programs that were asked
    queue: str = ""  # the default one; "" if there is none
    nodes: tuple[Nodes, ...] = ()


def scheduler(environ: Mapping[str, str]) -> Scheduler:
    """Ask the programs of the scheduler that is installed here. An unreachable scheduler yields no facts."""
    path = search_path(environ)
    if shutil.which("sinfo", path=path):
        return slurm(output(list(_SINFO), environ))
    if shutil.which("pbsnodes", path=path):
        return pbs(output(["qstat", "-Bf"], environ), output(["pbsnodes", "-a"], environ))
    if shutil.which("bparams", path=path):
        default = re.search(r"^Default Queues:[ \t]*(\S+)", output(["bparams"], environ), re.M)
        return Scheduler("lsf", "bparams", default[1] if default else "")
    return Scheduler()


def slurm(text: str) -> Scheduler:
    """Read the output of sinfo. The default partition is marked with a star."""
    default, nodes = "", []
    for line in text.splitlines():
        found = re.fullmatch(r"([^|]+)\|(\d+)\+?\|(\d+)\+?\|([^|]*)\|([^|]+)", line.strip())
        if not found:
            continue
        name = found[1].removesuffix("*")
        default = name if found[1].endswith("*") else default
        resources = re.sub(r"\([^)]*\)", "", found[4])  # without the sockets: gpu:a100:4(S:0-1)
        gpus = sum(map(int, re.findall(r"(?:^|,)gpu(?::[^:,]+)?:(\d+)", resources)))
        try:
            names = tuple(node_names(found[5]))
        except LaunchError:
            names = ()
        nodes.append(Nodes(names, int(found[2]), int(found[3]), gpus, name))
    return Scheduler("slurm", "sinfo", default, tuple(nodes))


def pbs(server: str, nodes: str) -> Scheduler:
    """Read the output of ``qstat -Bf`` and of ``pbsnodes -a``."""
    default = re.search(r"^\s*default_queue = (\S+)", server, re.M)
    found = []
    for block in re.split(r"\n\s*\n", nodes):
        name, *rest = block.strip().splitlines() or [""]
        values = dict(line.strip().partition(" = ")[::2] for line in rest)
        cpus, gpus, memory = (values.get(f"resources_available.{key}", "") for key in ("ncpus", "ngpus", "mem"))
        size = re.fullmatch(r"(\d+)([kmgt]?b)", memory)
        if cpus.isdecimal():
            mib = int(int(size[1]) * _KIB[size[2]]) >> 10 if size else 0
            found.append(Nodes((name.strip(),), int(cpus), mib, int(gpus) if gpus.isdecimal() else 0))
    return Scheduler("pbs", "qstat -Bf and pbsnodes -a", default[1] if default else "", tuple(found))
