"""Ways to start a job by a command line or a script: a pure file each, and a line in `TARGETS`."""

from __future__ import annotations

from hvdtrain.launch.targets import horovodrun, hydra, lsf, mpijob, openmpi, pbs, slurm, srun
from hvdtrain.launch.targets.base import Target

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        horovodrun.TARGET,
        openmpi.TARGET,
        hydra.MPICH,
        hydra.INTEL,
        srun.TARGET,
        slurm.TARGET,
        pbs.TARGET,
        lsf.TARGET,
        mpijob.TARGET,
    )
}
