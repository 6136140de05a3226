"""How agents start on other hosts: by ssh, or inside an allocation by its scheduler, as many sites forbid ssh there.

- ``srun``: a step that shares the cores, memory and GPUs of its node with other steps. Options from
  https://slurm.schedmd.com/srun.html. Without ``--exact`` a step has all cores that the job has on its node. GPUs must
  be requested: a step of one node cannot have all GPUs of ``salloc --gpus=8``, and has only one of
  ``--gpus-per-task=1``. With ``--gpus=N`` it has those of its node in each case (tested with Slurm 22.05).
- ``blaunch`` of LSF forwards stdin and stdout as ssh does, and without ``-no-shell`` a shell reads the command:
  https://www.ibm.com/docs/en/spectrum-lsf/10.1.0?topic=reference-blaunch
- ``pbs_tmrsh`` of PBS forwards neither stdin nor stdout, so `called_agent` connects the agent by TCP.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hvdtrain.errors import LaunchError
from hvdtrain.launch.called_agent import CONNECT
from hvdtrain.launch.choose import AUTO
from hvdtrain.launch.hosts import node_names
from hvdtrain.launch.srun_job import scancel_id
from hvdtrain.programs import run_program

SSH = "ssh"
JOBS: Mapping[str, tuple[str, str]] = {
    "srun": ("Slurm", "SLURM_JOB_ID"),
    "pbs_tmrsh": ("PBS", "PBS_JOBID"),
    "blaunch": ("LSF", "LSB_JOBID"),
}
"""Programs that start agents: their scheduler, and the variable that is set inside its allocations."""

_FILES = ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE")
"""Variables that name a file with one line per slot of an allocation."""

_SCONTROL_S = 30.0
_NODES = re.compile(r" Nodes=(\S+) CPU_IDs=\S* Mem=\S* GRES=(\S*)")
_GPUS = re.compile(r"\bgpu:(?:[^:(,]*:)?([0-9]{1,4})")


@dataclass(frozen=True)
class Starter:
    """How agents start on the hosts of an allocation; on others they start by ssh.

    `nodes`: the scheduler's name of each node by its short name; `gpus`: GPUs of the job on a node, for srun; `forced`:
    whether the user asked for this way, so that ssh is never used.
    """

    by: str = SSH
    nodes: Mapping[str, str] = field(default_factory=dict)
    gpus: Mapping[str, int] = field(default_factory=dict)
    forced: bool = False

    def names_of(self, hosts: Iterable[str]) -> list[str]:
        """Return the scheduler's names of those hosts that are nodes of the allocation."""
        return [self.nodes[short] for short in map(short_name, hosts) if short in self.nodes]

    def by_for(self, host: str) -> str:
        """Return the program that starts the agent of a host."""
        return self.by if self.forced or short_name(host) in self.nodes else SSH

    def command(self, host: str, python: str, code: str, interface: str) -> list[str]:
        """Return the command that runs Python code on a host of the allocation, with stdin and stdout."""
        node = self.nodes.get(short_name(host), host)
        argv = [python, "-c", code]
        if self.by == "srun":
            gpus = [f"--gpus={self.gpus[node]}"] if self.gpus.get(node) else []
            where = ["--nodes=1", "--ntasks=1", f"--nodelist={node}"]
            return ["srun", "--overlap", *where, *gpus, "--mem=0", "--cpu-bind=none", "--mpi=none", *argv]
        if self.by == "blaunch":
            return ["blaunch", "-no-shell", node, *argv]
        by = ["--interface", interface] if interface else []
        return [python, "-m", "hvdtrain.launch.called_agent", *by, "pbs_tmrsh", node, python, "-c", CONNECT + code]


def short_name(host: str) -> str:
    """Return a host's name without its domain. Of an IP address it is no name of a host."""
    return host.partition(".")[0]


def allocation_slots(environ: Mapping[str, str]) -> list[str]:
    """Return the lines of the file with a line per slot of an allocation of PBS or LSF; none outside of them."""
    file = next((environ[name] for name in _FILES if name in environ), None)
    return Path(file).read_text().split() if file else []


def find_starter(asked: str, environ: Mapping[str, str], path: str) -> Starter:
    """Find how agents start. `asked`: the value of ``--agents``; `path`: where programs are looked for.

    Errors:
        LaunchError: not inside an allocation of that scheduler, or its program is missing.
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
    if by == SSH:
        return Starter()
    in_slurm = by == "srun"
    nodes = environ.get("SLURM_JOB_NODELIST")
    names = (node_names(nodes) if nodes else []) if in_slurm else allocation_slots(environ)
    return Starter(by, {short_name(name): name for name in names}, _gpus(environ) if in_slurm else {}, asked != AUTO)


def _gpus(environ: Mapping[str, str]) -> dict[str, int]:
    """Return the GPUs of this job on each node; none where scontrol does not answer."""
    argv = ["scontrol", "--details", "--oneliner", "show", "job", scancel_id(environ)]
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
