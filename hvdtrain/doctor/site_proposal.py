"""Propose a profile of this site, from facts: ``hvdtrain doctor --write-site``.

Each line has its source in a comment. A line for a fact that is unknown is a comment too. The default queue and the
hardware of nodes are from the scheduler: sinfo(1) of Slurm 22.05; qstat(1B) and pbsnodes(8B) of OpenPBS 23; bparams(1)
of LSF 10.1.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hvdtrain.doctor.facts.machine import Network
from hvdtrain.errors import LaunchError
from hvdtrain.launch.choose import choose
from hvdtrain.launch.detect import Machine, search_path
from hvdtrain.launch.hosts import node_names
from hvdtrain.launch.variables import secret_variables
from hvdtrain.programs import output
from hvdtrain.yaml_file import yaml_text

_SINFO = ("sinfo", "--noheader", "--exact", "--format=%P|%c|%m|%G|%N")
_KIB = {"b": 1 / 1024, "kb": 1, "mb": 1 << 10, "gb": 1 << 20, "tb": 1 << 30}

_HEAD = """\
# A profile of this site for hvdtrain launch, proposed by hvdtrain doctor on {host}. Check each line.
# Use it: hvdtrain launch --site FILE. In ~/.config/hvdtrain/sites, or in /etc/hvdtrain/sites for all users, it is
# found by host name.
"""


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


@dataclass(frozen=True)
class SiteFacts:
    """The facts from which a profile is proposed."""

    environ: Mapping[str, str]  # of this shell, without the variables that hvdtrain set
    scheduler: Scheduler
    machine: Machine
    network: Network


def propose_site(facts: SiteFacts) -> str:
    """Return the text of the profile."""
    nodes = [name for kind in facts.scheduler.nodes for name in kind.names]
    names = [facts.network.name.partition(".")[0], *nodes]
    # A name of numbers alone, such as an address, stays.
    patterns = [re.sub("[0-9]+", "*", name) if re.search("[A-Za-z]", name) else name for name in names]
    source = f" and the nodes that {facts.scheduler.source} lists" if nodes else ""
    hosts = _known("hosts", list(dict.fromkeys(patterns)), f"this host{source}, with * for numbers")
    lines = [_HEAD.format(host=facts.network.name), *hosts]
    lines += ["", "options:", *(f"  {line}" for line in _options(facts))]
    lines += ["", "environment:", *(f"  {line}" for line in _variables(facts))]
    modules = [name for name in facts.environ.get("LOADEDMODULES", "").split(":") if name]
    loaded, missing = "the modules that are loaded in this shell", "no modules are loaded in this shell"
    lines += ["", *_either("modules", modules, loaded, "[openmpi, cuda]", missing)]
    lines += ["", *_unknown("setup: [ulimit -l unlimited]", "lines of shell for batch scripts, before the modules")]
    return "\n".join(lines) + "\n"


def _options(facts: SiteFacts) -> Iterator[str]:
    found = facts.scheduler
    source = f"by {found.source}"
    if found.target:
        yield from _unknown(
            f"to: {found.target}", "only if all jobs, also those started in an allocation, are submitted"
        )
    missing = "no default partition or queue was found"
    yield from _either("queue", found.queue, f"the default partition or queue, {source}", "NAME", missing)
    yield from _unknown("account: NAME", "the account to charge, if the site needs one")
    nodes = [kind for kind in found.nodes if kind.queue in ("", found.queue)]
    yield from _hardware(nodes, source)
    with_gpus = sorted({kind.queue for kind in found.nodes if kind.gpus and kind.queue not in ("", found.queue)})
    if with_gpus:
        yield f"# other partitions with GPUs: {', '.join(with_gpus)}"
    outward = facts.network.outward
    best = max(outward, key=lambda one: (one.mbit, one.name == facts.network.route), default=None)
    names = ", ".join(f"{one.name} {one.address}" for one in outward)
    why = f"the fastest of this host: {names}; compute nodes may have others"
    yield from _either("interface", best and best.name, why, "eth0", "this host has no network except the loopback")
    if found.target == "slurm":
        mpi = choose("srun", (), facts.machine).mpi
        kinds = ", ".join(facts.machine.slurm_mpi) or "nothing"
        why = f"srun --mpi=list has {kinds}, and Horovod uses {mpi or 'no MPI'}"
        yield from _either("pmi", facts.machine.slurm_mpi_for(mpi), why, "pmix", why)


def _hardware(nodes: list[Nodes], source: str) -> Iterator[str]:
    gib = min((kind.memory_mib >> 10 for kind in nodes), default=0)
    whole = f"the whole memory of a node, {source}; --mem asks for less"
    yield from _either("mem", gib and f"{gib}G", whole, "400G", "the memory of a node was not found")
    gpus = [kind for kind in nodes if kind.gpus and kind.cpus >= kind.gpus]
    least = min(gpus, key=lambda kind: kind.cpus // kind.gpus, default=Nodes((), 0, gpus=1))
    why = f"a node has {least.cpus} CPUs and {least.gpus} GPUs, {source}"
    missing = "the CPUs of a node divided by its GPUs; no GPUs were found"
    yield from _either("cpus_per_rank", least.cpus // least.gpus, why, "8", missing)


def _variables(facts: SiteFacts) -> Iterator[str]:
    ports = [port for port in facts.network.rdma if port.active]
    ports = [port for port in ports if port.layer == "InfiniBand"] or ports
    environ, hidden = facts.environ, secret_variables(facts.environ)
    own = [name for name in environ if name.startswith(("NCCL_", "UCX_")) and name not in hidden]
    if ports and "NCCL_IB_HCA" not in own:
        value = ",".join(f"{port.device}:{port.port}" for port in ports)
        why = "the active ports of this host's cards, by /sys/class/infiniband; "
        yield from _unknown(f"NCCL_IB_HCA: ={value}", why + "NCCL uses all of a node if it is not set")
    elif not ports:
        yield from _unknown("NCCL_IB_HCA: mlx5", "no active port of a card was found in /sys/class/infiniband")
    for name in sorted(own):
        if environ[name]:
            yield from _known(name, environ[name], "set in this shell")


def _either(name: str, value: object, source: str, example: str, missing: str) -> Iterator[str]:
    """Yield a line with its source, or without a value an example, with the reason why the value is missing."""
    yield from _known(name, value, source) if value else _unknown(f"{name}: {example}", missing)


def _known(name: str, value: object, source: str) -> Iterator[str]:
    yield f"# {source}"
    style = None if isinstance(value, list) else False
    yield yaml_text({name: value}, default_flow_style=style, width=1 << 20).rstrip("\n")


def _unknown(line: str, why: str) -> Iterator[str]:
    yield f"# {why}"
    yield f"# {line}"
