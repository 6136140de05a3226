"""Slurm: a script for ``sbatch``, which requeues itself before its time limit and on pre-emption.

Directives from sbatch(1) of Slurm 22.05.
"""

from __future__ import annotations

from hvdtrain.launch.spec import JobSpec, Script, join
from hvdtrain.launch.targets import srun
from hvdtrain.launch.targets.base import SCHEDULED, Target, clock, fill
from hvdtrain.launch.targets.in_hosts import insert_array_index


def render(spec: JobSpec) -> Script:
    """Return the script of a job."""
    batch = spec.batch
    line = join(insert_array_index(word, "SLURM_ARRAY_TASK_ID") for word in srun.argv(spec))
    return Script(
        fill("slurm.sh.j2", spec=spec, batch=batch, line=line, clock=clock, variables=srun.variables(spec)),
        ("sbatch",),
    )


_TAKES = SCHEDULED | {"array", "notice", "requeues", "interface", "mem"}
TARGET = Target("slurm", render, takes=_TAKES, even=True)
