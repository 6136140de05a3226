"""LSF: a script for ``bsub``; ranks by mpirun, or by jsrun where LSF allocates whole hosts (IBM's CSM).

Directives from bsub(1) of LSF 10.1. ``$LSB_DJOB_HOSTFILE`` has a line per slot of a host. Arrays start at index 1.
"""

from __future__ import annotations

import re
from typing import Any

from hvdtrain.errors import LaunchError
from hvdtrain.launch.spec import JobSpec, Script, join
from hvdtrain.launch.targets.base import SCHEDULED, Target, fill, network_variables
from hvdtrain.launch.targets.container import rank_argv
from hvdtrain.launch.targets.in_hosts import insert_array_index, refuse_start, start_values, stop_variables


def render(spec: JobSpec) -> Script:
    """Return the script of a job."""
    array, time_s = spec.batch.array, spec.batch.time_s
    if array and 0 in map(int, re.split("[-,%]", array)):
        raise LaunchError("LSF's arrays start at index 1", expected="--array 1-4", found=f"--array {array}")
    values = dict(start_values(spec, "LSB_DJOB_HOSTFILE", "LSB_JOBINDEX"))
    if spec.batch.jsrun:
        values["line"] = join(insert_array_index(word, "LSB_JOBINDEX") for word in _by_jsrun(spec))
        values["variables"] = {**network_variables(spec), **stop_variables(spec)}
    return Script(fill("lsf.sh.j2", **values, **_AGAIN, minutes=-(-time_s // 60) if time_s else None), ("bsub",))


def _by_jsrun(spec: JobSpec) -> tuple[str, ...]:
    """Return the command line of jsrun: one resource set per rank, with its GPU."""
    words = ["jsrun", "--nrs", str(spec.ranks), "--rs_per_host", str(spec.ranks_per_node), "--tasks_per_rs", "1"]
    words += ["--cpu_per_rs", str(spec.cpus_per_rank)] if spec.cpus_per_rank else []
    words += ["--gpu_per_rs", "1"] if spec.gpus_per_node else []
    return (*words, "--bind", "none", *spec.launcher_arguments, *rank_argv(spec))


_AGAIN: dict[str, Any] = {"id": "LSB_JOBID", "submit": 'bsub -w "ended($LSB_JOBID)"'}
"""How a job submits itself again, to start once it has ended: bsub(1), ``-w``."""

_TAKES = SCHEDULED | {"array", "notice", "interface", "requeues", "agents"}
TARGET = Target("lsf", render, _TAKES, refuse=refuse_start, even=True, shows_variables=True)
