"""Launchers that hvdtrain does not support: their ranks would each train alone, so it refuses them.

torchrun is one of them, unless the engine needs no Horovod.
"""

from __future__ import annotations

import re

from hvdtrain.errors import LaunchError
from hvdtrain.runtime.environment import ALONE, NO_LAUNCHER, TORCHRUN, RankInfo, elastic

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


def _unused_launcher(info: RankInfo, *, horovod: bool) -> tuple[str, str] | None:
    """Return the variable that shows an unsupported launcher of several processes, and the launcher's name.

    Each process would train alone, or take the rank of another. None without such a variable, or with `ALONE`.
    """
    variables = info.variables
    if variables.get(ALONE) == "1" or elastic(variables):  # or our agents are tasks of srun
        return None
    if info.size > 1:
        return ("WORLD_SIZE", TORCHRUN) if info.launcher == TORCHRUN and horovod else None
    if info.launcher == TORCHRUN:
        return None
    sizes = _SIZES_OF_OTHERS
    if info.launcher == NO_LAUNCHER and "SLURM_STEP_ID" in variables:
        sizes = {**sizes, "SLURM_NTASKS": "srun"}  # without a step it is the size of the allocation
    for variable, launcher in sizes.items():
        text = variables.get(variable, "").strip()
        if re.fullmatch(r"[0-9]{1,9}", text) and int(text) > 1:
            return variable, launcher
    ranks = _RANKS_OF_OTHERS.items() if info.launcher == NO_LAUNCHER else ()
    return next((found for found in ranks if found[0] in variables), None)


def refuse_unused_launcher(info: RankInfo, *, horovod: bool = True) -> None:
    """Raise LaunchError where a launcher of several processes started this one, but they are not ranks of one job.

    `horovod`: whether the ranks communicate by Horovod, so that torchrun's are not those of one job.
    """
    if (found := _unused_launcher(info, horovod=horovod)) is None:
        return
    variable, launcher = found
    value = info.variables.get(variable, "")
    supported = info.launcher not in (NO_LAUNCHER, TORCHRUN)
    joined = f"{info.size} rank(s) by {info.launcher}" if supported else "no launcher that hvdtrain supports"
    number = value if variable in _SIZES_OF_OTHERS else "N"
    with_torch = "--parallel.engine ddp, which torchrun can start; or " if info.launcher == TORCHRUN else ""
    raise LaunchError(
        f"{launcher} seems to have started this process, but not as a rank of a Horovod job: each process would train"
        " on its own",
        expected="ranks started by hvdtrain launch, horovodrun, mpirun or srun",
        found=f"{variable}={value}, and {joined}",
        next_step=f"{with_torch}hvdtrain launch -np {number} -- OPTIONS, without {launcher}; to train in this process"
        f" alone: {ALONE}=1",
    )
