"""What the checks look at, found out once, a file a topic; all at the same time, all of it plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from hvdtrain.doctor.gather.installation import Installation, installation
from hvdtrain.doctor.gather.machine import Machine, machine
from hvdtrain.doctor.gather.mpi import MpiFacts, mpi_facts
from hvdtrain.runtime.environment import RankInfo
from hvdtrain.runtime.tuning import Choice


@dataclass(frozen=True)
class Gathered:
    """Everything that the checks look at.

    Attributes:
        info, choices: from `runtime.tuning.prepare`.
        environ: of this process.
        installation, mpi, machine: each from the file of its name.
    """

    info: RankInfo
    choices: Sequence[Choice]
    environ: Mapping[str, str]
    installation: Installation
    mpi: MpiFacts
    machine: Machine


def gather(info: RankInfo, choices: Sequence[Choice], environ: Mapping[str, str]) -> Gathered:
    """Find out everything; takes as long as importing torch and Horovod. Collective: no."""
    with ThreadPoolExecutor(16) as pool:
        installed = pool.submit(installation, pool)
        mpi = pool.submit(mpi_facts, info, environ, pool)
        return Gathered(
            info=info,
            choices=choices,
            environ=environ,
            machine=machine(environ),
            mpi=mpi.result(),
            installation=installed.result(),
        )
