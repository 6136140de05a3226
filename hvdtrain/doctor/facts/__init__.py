"""The facts that the checks use: gathered once, in parallel, one file per topic, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.doctor.facts.installation import Installation, MpiFacts, installation, mpi_facts
from hvdtrain.doctor.facts.machine import GpuFacts, Machine, Network, gpu_facts, machine, network
from hvdtrain.doctor.facts.storage import storage
from hvdtrain.errors import LaunchError
from hvdtrain.programs import Answer
from hvdtrain.runtime.environment import RankInfo
from hvdtrain.runtime.tuning import without_our_variables

_WORKERS = 16  # more threads than there are probes that wait for other probes


@dataclass(frozen=True)
class DoctorFacts:
    """All facts that the checks use."""

    info: RankInfo
    environ: Mapping[str, str]  # of this process, without the variables that hvdtrain set
    installation: Installation
    mpi: MpiFacts
    machine: Machine
    gpu: GpuFacts
    network: Network
    run_dir: Path  # as the user named it
    storage: Answer  # about the run folder, of `storage`


def gather(
    info: RankInfo, environ: Mapping[str, str], run_dir: Path, refusal: LaunchError | None = None
) -> DoctorFacts:
    """Gather all facts. This takes as long as importing torch and Horovod. Collective: no.

    ``refusal``: error of the launcher's variables, if they are inconsistent.
    """
    before = without_our_variables(environ)
    with ThreadPoolExecutor(_WORKERS) as pool:
        installed = pool.submit(installation, before, pool)
        mpi = pool.submit(mpi_facts, info, before, pool, refusal)
        gpu, net, disk = pool.submit(gpu_facts), pool.submit(network), pool.submit(storage, run_dir)
        return DoctorFacts(
            info=info,
            environ=before,
            machine=machine(before),
            gpu=gpu.result(),
            network=net.result(),
            run_dir=run_dir,
            storage=disk.result(),
            mpi=mpi.result(),
            installation=installed.result(),
        )
