"""Which communicator a job gets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvdtrain.comm.base import Comm
from hvdtrain.comm.solo import SoloComm
from hvdtrain.runtime.environment import GLOO_LAUNCHER, RankInfo

if TYPE_CHECKING:
    from hvdtrain.comm.horovod import HorovodComm


def start_comm(info: RankInfo) -> Comm:
    """Join the job that the launcher started; without one, a job of one rank that needs no Horovod.

    Collective: yes. `runtime.tuning.prepare` comes before.

    Errors:
        HorovodError: missing, or built for another torch, or without MPI.
        LaunchError: this process belongs to an MPI that Horovod does not speak to.
    """
    return SoloComm() if info.launcher == "none" else _horovod(info)


def _horovod(info: RankInfo) -> HorovodComm:
    from hvdtrain.install import record
    from hvdtrain.runtime import mpi

    record.check(by_mpi=info.launcher != GLOO_LAUNCHER)
    mpi.check_launch(info)
    from hvdtrain.comm.horovod import HorovodComm

    comm = HorovodComm()
    mpi.check_size(info, comm.size)
    return comm
