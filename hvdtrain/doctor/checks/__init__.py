"""The checks. Each is a function of the gathered facts, named in `CHECKS`."""

from __future__ import annotations

from collections.abc import Callable

from hvdtrain.doctor.checks import host, installation, mpi, network
from hvdtrain.doctor.facts import DoctorFacts
from hvdtrain.doctor.report import Finding

CHECKS: tuple[Callable[[DoctorFacts], Finding | None], ...] = (
    *(installation.hvdtrain, installation.torch, installation.torch_files, installation.horovod),
    *(installation.stock_build, installation.untested_build, installation.distutils, installation.nccl),
    installation.nccl_library,
    *(mpi.libmpi, mpi.mpirun, mpi.horovodrun, mpi.opal_prefix, mpi.as_root, mpi.remote_shell, mpi.launcher),
    *(mpi.stale_launcher, mpi.controller, mpi.slurm_step, mpi.rendezvous, mpi.secrets, mpi.half_over_gloo),
    *(network.leftovers, network.shared_memory_off),
    installation.packages,
    *(host.host, host.binding, host.locality, host.oversubscription, host.memory, host.shared_memory),
    *(host.open_files, host.processes, host.locked_memory, host.huge_pages),
    *(installation.gpus, installation.driver, installation.pinned_memory, installation.half_routes),
    *(network.host_name, network.interfaces, network.named_interfaces, network.rdma, network.ucx),
    installation.gpu_direct,
    *(host.run_dir, host.run_dir_shared),
)


def examine(facts: DoctorFacts) -> list[Finding]:
    """Run all checks and return their findings. A check that does not apply returns None."""
    return [finding for check in CHECKS if (finding := check(facts)) is not None]
