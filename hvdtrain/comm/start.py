"""Create the communicator of a job."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hvdtrain.comm.base import Comm
from hvdtrain.comm.rounds import DriverRounds, OneRound, Rounds, StockRounds
from hvdtrain.comm.solo import SoloComm
from hvdtrain.runtime.driver_client import connect_to_driver
from hvdtrain.runtime.environment import GLOO_LAUNCHER, NO_LAUNCHER, TORCHRUN, RankInfo, refuse_unused_launcher
from hvdtrain.runtime.interfaces import refuse_without_address

Groups = Callable[[int], Sequence[Sequence[int]]]
"""Returns the ranks of each group that will exchange apart, of a number of ranks."""


def no_groups(size: int) -> Sequence[Sequence[int]]:
    """Return none."""
    return []


def start_rounds(info: RankInfo, groups: Groups = no_groups, *, horovod: bool = True) -> Rounds:
    """Return the rounds of this job. A job that is not elastic has one, which is joined here.

    `groups`: of ranks that will exchange apart. `horovod`: whether training needs Horovod; without it torchrun may have
    started the ranks. Collective: yes, unless of hvdtrain's own elastic driver. Errors: those of `start_comm`.
    """
    refuse_unused_launcher(info, horovod=horovod)
    client = connect_to_driver(info.variables)
    if client is not None:
        return DriverRounds(client, info)
    comm = start_comm(info, groups)
    if info.launcher == GLOO_LAUNCHER and info.variables.get("HOROVOD_ELASTIC") == "1":  # set by Horovod's own driver
        return StockRounds(comm)
    return OneRound(comm)


def start_comm(info: RankInfo, groups: Groups = no_groups) -> Comm:
    """Join the job that the launcher started; without a launcher, return a job of one rank that needs no Horovod.

    `groups`: of ranks that will exchange apart. Collective: yes. Call `runtime.tuning.prepare` before.

    Errors:
        ConfigError: the ranks cannot form these groups.
        HorovodError: missing, or built for another torch, or without MPI.
        LaunchError: this process was started by an MPI that Horovod does not use, or by a launcher that does not start
            the ranks of one job.
    """
    sets = groups(info.size)
    if info.launcher == NO_LAUNCHER or (info.launcher == TORCHRUN and info.size == 1):
        return SoloComm()
    if info.launcher == TORCHRUN:
        from hvdtrain.comm.torch_group import join_torchrun

        return join_torchrun(info)
    from hvdtrain.install import record
    from hvdtrain.runtime import mpi

    record.check(by_mpi=info.launcher != GLOO_LAUNCHER)
    mpi.check_launch(info)
    refuse_without_address(info.variables)
    from hvdtrain.comm.horovod import HorovodComm

    comm = HorovodComm(groups=sets)
    mpi.check_size(info, comm.size)
    return comm
