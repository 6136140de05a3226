"""What the checks look at, found out once, a file a topic; all at the same time, all of it plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.doctor.facts.gpu import GpuFacts, gpu_facts
from hvdtrain.doctor.facts.installation import Installation, installation
from hvdtrain.doctor.facts.machine import Machine, machine
from hvdtrain.doctor.facts.mpi import MpiFacts, mpi_facts
from hvdtrain.doctor.facts.network import Network, network
from hvdtrain.doctor.facts.storage import Storage, storage
from hvdtrain.doctor.nccl_log import NcclLog
from hvdtrain.errors import LaunchError
from hvdtrain.runtime.environment import RankInfo
from hvdtrain.runtime.tuning import Choice, of_others

_WORKERS = 16
"""More than there are probes that wait for others of them."""


@dataclass(frozen=True)
class Gathered:
    """Everything that the checks look at.

    Attributes:
        info, choices: from `runtime.tuning.prepare`.
        environ: of this process, without what we ourselves wrote there.
        installation, mpi, machine, gpu, network, storage: each from the file of its name.
        nccl_log: what was read of a log, where one was given.
    """

    info: RankInfo
    choices: Sequence[Choice]
    environ: Mapping[str, str]
    installation: Installation
    mpi: MpiFacts
    machine: Machine
    gpu: GpuFacts
    network: Network
    storage: Storage
    nccl_log: NcclLog | None = None


def gather(
    info: RankInfo,
    choices: Sequence[Choice],
    environ: Mapping[str, str],
    run_dir: Path,
    nccl_log: NcclLog | None = None,
    refusal: LaunchError | None = None,
) -> Gathered:
    """Find out everything; takes as long as importing torch and Horovod. Collective: no.

    Args:
        info: as in `Gathered`.
        choices: so too.
        environ: of this process.
        run_dir: the folder that runs are written to.
        nccl_log: as in `Gathered`.
        refusal: why the launcher's variables do not say which rank this is, where they do not.
    """
    before = of_others(environ)
    with ThreadPoolExecutor(_WORKERS) as pool:
        installed = pool.submit(installation, before, pool)
        mpi = pool.submit(mpi_facts, info, before, pool, refusal)
        gpu, net, disk = pool.submit(gpu_facts), pool.submit(network), pool.submit(storage, run_dir)
        return Gathered(
            info=info,
            choices=choices,
            environ=before,
            machine=machine(before),
            gpu=gpu.result(),
            network=net.result(),
            storage=disk.result(),
            mpi=mpi.result(),
            installation=installed.result(),
            nccl_log=nccl_log,
        )
