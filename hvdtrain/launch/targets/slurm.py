"""Slurm: a script for ``sbatch``, which requeues itself before its time limit and on pre-emption.

Directives from sbatch(1) of Slurm 22.05.
"""

from __future__ import annotations

from dataclasses import replace

from hvdtrain.launch.spec import JobSpec, Script, Shell, join
from hvdtrain.launch.targets import srun
from hvdtrain.launch.targets.base import SCHEDULED, Target, clock, fill
from hvdtrain.launch.targets.in_hosts import insert_array_index


def render(spec: JobSpec) -> Script:
    """Return the script of a job."""
    batch = spec.batch
    line = join(insert_array_index(word, "SLURM_ARRAY_TASK_ID") for word in srun.argv(spec))
    values = {"spec": spec, "batch": batch, "line": line, "variables": srun.variables(spec)}
    check = replace(spec, arguments=("preflight", "--write", Shell('"$bad"')), is_program=False)
    text = fill(
        "slurm.sh.j2",
        **values,
        clock=clock,
        preflight=join(srun.argv(check)) if batch.preflight else "",
        preflight_s=_IMAGE_S if spec.container else _PREFLIGHT_S,
    )
    return Script(text, ("sbatch",))


_PREFLIGHT_S = 180
"""Time for the preflight and the start of its ranks: its own limit is 120 s."""
_IMAGE_S = 1800
"""The same where each node first fetches the image."""

_TAKES = SCHEDULED | {"array", "notice", "requeues", "interface", "mem", "preflight", "pmi"}
TARGET = Target("slurm", render, takes=_TAKES, choose=srun.choose, even=True, by_srun=True, shows_variables=True)
