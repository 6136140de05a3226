"""PBS: a script for ``qsub`` of OpenPBS and PBS Professional.

Directives from qsub(1B) of OpenPBS 23. ``$PBS_NODEFILE`` has a line per ``mpiprocs`` of a host.
"""

from __future__ import annotations

from typing import Any

from hvdtrain.errors import LaunchError
from hvdtrain.launch.spec import JobSpec, Script
from hvdtrain.launch.targets.base import SCHEDULED, Target, clock, fill
from hvdtrain.launch.targets.in_hosts import refuse_start, start_values


def render(spec: JobSpec) -> Script:
    """Return the script of a job."""
    if "," in (spec.batch.array or ""):
        raise LaunchError("an array of PBS is one range", expected="--array 0-3", found=f"--array {spec.batch.array}")
    cores = (spec.cpus_per_rank or 1) * spec.ranks_per_node
    values = start_values(spec, "PBS_NODEFILE", "PBS_ARRAY_INDEX")
    return Script(fill("pbs.sh.j2", **values, **_AGAIN, cores=cores, clock=clock), ("qsub",))


_AGAIN: dict[str, Any] = {"id": "PBS_JOBID", "submit": 'qsub -W "depend=afterany:$PBS_JOBID"'}
"""How a job submits itself again, to start once it has ended: qsub(1B), ``-W depend``."""

_TAKES = SCHEDULED | {"array", "notice", "interface", "mem", "chunk", "requeues", "agents"}
TARGET = Target("pbs", render, _TAKES, refuse=refuse_start, even=True, shows_variables=True)
