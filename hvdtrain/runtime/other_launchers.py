"""Launchers that hvdtrain does not support: their ranks would each train alone, so it refuses them."""

from __future__ import annotations

import re

from hvdtrain.errors import LaunchError
from hvdtrain.runtime.environment import NO_LAUNCHER, RankInfo, elastic

ALONE = "HVDTRAIN_ALONE"
"""Set to 1: train in this process alone, whatever launcher started it."""

_SIZES_OF_OTHERS = {
    "WORLD_SIZE": "torchrun",
    "PMI_SIZE": "an MPI launcher",
    "MV2_COMM_WORLD_SIZE": "MVAPICH's mpirun",
    "JSM_NAMESPACE_SIZE": "jsrun",
    "FLUX_JOB_SIZE": "flux run",
}
"""Variables with the number of processes of unsupported launchers, and the launchers' names."""

_RANKS_OF_OTHERS = {"PMIX_RANK": "a PMIx launcher", "PALS_RANKID": "Cray's mpiexec", "ALPS_APP_PE": "aprun"}
"""Variables of launchers that set a rank, but not the number of processes."""


def _unused_launcher(info: RankInfo) -> tuple[str, str] | None:
    """Return the variable that shows an unsupported launcher of several processes, and the launcher's name.

    Each process would train alone, or take the rank of another. None without such a variable, or with `ALONE`.
    """
    variables = info.variables
    if variables.get(ALONE) == "1" or elastic(variables):  # or our agents are tasks of srun
        return None
    if info.size > 1:
        # torchrun inside a job of another launcher: several processes have the same rank
        nested = "TORCHELASTIC_RUN_ID" in variables and variables.get("WORLD_SIZE") != str(info.size)
        return ("WORLD_SIZE", "torchrun") if nested else None
    sizes = _SIZES_OF_OTHERS
    if info.launcher == NO_LAUNCHER and "SLURM_STEP_ID" in variables:
        sizes = {**sizes, "SLURM_NTASKS": "srun"}  # without a step it is the size of the allocation
    for variable, launcher in sizes.items():
        text = variables.get(variable, "").strip()
        if re.fullmatch(r"[0-9]{1,9}", text) and int(text) > 1:
            return variable, launcher
    ranks = _RANKS_OF_OTHERS.items() if info.launcher == NO_LAUNCHER else ()
    return next((found for found in ranks if found[0] in variables), None)


def refuse_unused_launcher(info: RankInfo) -> None:
    """Raise LaunchError where a launcher of several processes started this one, but they are not ranks of one job."""
    if (found := _unused_launcher(info)) is None:
        return
    variable, launcher = found
    value = info.variables.get(variable, "")
    supported = info.launcher != NO_LAUNCHER
    joined = f"{info.size} rank(s) by {info.launcher}" if supported else "no launcher that hvdtrain supports"
    number = value if variable in _SIZES_OF_OTHERS else "N"
    raise LaunchError(
        f"{launcher} seems to have started this process, but not as a rank of a Horovod job: each process would train"
        " on its own",
        expected="ranks started by hvdtrain launch, horovodrun, mpirun or srun",
        found=f"{variable}={value}, and {joined}",
        next_step=f"hvdtrain launch -np {number} -- OPTIONS, without {launcher}; to train in this process alone:"
        f" {ALONE}=1",
    )
