"""Ways to start a job by a command line or a script, by their names for ``--to``."""

from __future__ import annotations

from hvdtrain.launch.targets import mpi, mpijob, schedulers
from hvdtrain.launch.targets.base import Target

_BY_MPI = (mpi.HOROVODRUN, mpi.OPENMPI, mpi.MPICH, mpi.INTEL)
_BY_SCHEDULER = (schedulers.SRUN, schedulers.SLURM, schedulers.PBS, schedulers.LSF)
TARGETS: dict[str, Target] = {target.name: target for target in (*_BY_MPI, *_BY_SCHEDULER, mpijob.TARGET)}
