"""Ways to start a job by a command line or a script, by their names for ``--to``."""

from __future__ import annotations

from hvdtrain.launch.targets import mpi, mpijob, pbs_lsf, slurm
from hvdtrain.launch.targets.base import Target

_ALL = (mpi.HOROVODRUN, mpi.OPENMPI, mpi.MPICH, mpi.INTEL, slurm.SRUN, slurm.SLURM, pbs_lsf.PBS, pbs_lsf.LSF)
TARGETS: dict[str, Target] = {target.name: target for target in (*_ALL, mpijob.TARGET)}
