"""The ways to start a job that are command lines or scripts: one pure file each, one line each in `TARGETS`."""

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
