"""Launchers that hvdtrain does not use: their ranks would each train alone, so they are refused."""

from __future__ import annotations

import re

from hvdtrain.errors import LaunchError
from hvdtrain.runtime.environment import NO_LAUNCHER, RankInfo, elastic

ALONE = "HVDTRAIN_ALONE"
"""Set to 1: train in this process alone, whatever launcher there are signs of."""

_SIZES_OF_OTHERS = {
    "WORLD_SIZE": "torchrun",
    "PMI_SIZE": "an MPI launcher",
    "MV2_COMM_WORLD_SIZE": "MVAPICH's mpirun",
    "JSM_NAMESPACE_SIZE": "jsrun",
    "FLUX_JOB_SIZE": "flux run",
}
"""Variables that hold the number of processes of a launcher that is not in `LAUNCHERS`, and its name."""

_RANKS_OF_OTHERS = {"PMIX_RANK": "a PMIx launcher", "PALS_RANKID": "Cray's mpiexec", "ALPS_APP_PE": "aprun"}
"""Variables of launchers that tell a process its rank, but not how many there are."""


def _unused_launcher(info: RankInfo) -> tuple[str, str] | None:
    """Return the variable that shows a launcher of several processes that this job does not use, and its name.

    Each of them would train alone, or take the rank of another. None where there is no such sign, or where `ALONE` is
    set.
    """
    variables = info.variables
    if variables.get(ALONE) == "1" or elastic(variables):  # ours may be alone where srun started several agents
        return None
    if info.size > 1:
        # torchrun inside a job of another launcher: several processes have the rank of one.
        nested = "TORCHELASTIC_RUN_ID" in variables and variables.get("WORLD_SIZE") != str(info.size)
        return ("WORLD_SIZE", "torchrun") if nested else None
    sizes = _SIZES_OF_OTHERS
    if info.launcher == NO_LAUNCHER and "SLURM_STEP_ID" in variables:  # elsewhere it is the size of the allocation
        sizes = {**sizes, "SLURM_NTASKS": "srun"}
    for variable, launcher in sizes.items():
        text = variables.get(variable, "").strip()
        if re.fullmatch(r"[0-9]{1,9}", text) and int(text) > 1:
            return variable, launcher
    ranks = _RANKS_OF_OTHERS.items() if info.launcher == NO_LAUNCHER else ()
    return next((found for found in ranks if found[0] in variables), None)


def refuse_unused_launcher(info: RankInfo) -> None:
    """Raise an error where a launcher of several processes started this one, but they are not the ranks of one job.

    Errors:
        LaunchError: its variables are there, and this job does not go by them.
    """
    if (found := _unused_launcher(info)) is None:
        return
    variable, launcher = found
    value = info.variables.get(variable, "")
    joined = "no launcher that hvdtrain understands"
    if info.launcher != NO_LAUNCHER:
        joined = f"{info.size} rank(s) by {info.launcher}"
    number = value if variable in _SIZES_OF_OTHERS else "N"
    raise LaunchError(
        f"{launcher} seems to have started this process, but not as a rank of a Horovod job: each process would train"
        " on its own",
        expected="ranks started by hvdtrain launch, horovodrun, mpirun or srun",
        found=f"{variable}={value}, and {joined}",
        next_step=f"hvdtrain launch -np {number} -- OPTIONS, without {launcher}; to train in this process alone:"
        f" {ALONE}=1",
    )
