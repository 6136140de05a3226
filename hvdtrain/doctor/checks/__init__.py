"""The checks. Each is a function of the gathered facts and one line in `CHECKS`; NCCL's log has its own."""

from __future__ import annotations

from collections.abc import Callable

from hvdtrain.doctor import nccl_log
from hvdtrain.doctor.checks import gpu, host, installation, launcher, mpi, network, storage, variables
from hvdtrain.doctor.facts import DoctorFacts
from hvdtrain.doctor.finding import Finding

CHECKS: tuple[Callable[[DoctorFacts], Finding | None], ...] = (
    installation.hvdtrain,
    installation.torch,
    installation.torch_files,
    installation.horovod,
    installation.stock_build,
    installation.untested_build,
    installation.distutils,
    gpu.nccl,
    gpu.nccl_library,
    mpi.libmpi,
    mpi.mpirun,
    mpi.horovodrun,
    mpi.mpi4py,
    mpi.opal_prefix,
    mpi.as_root,
    mpi.remote_shell,
    launcher.launcher,
    launcher.stale_launcher,
    launcher.controller,
    launcher.slurm_step,
    launcher.rendezvous,
    launcher.secrets,
    launcher.half_over_gloo,
    variables.leftovers,
    variables.shared_memory_off,
    installation.packages,
    host.host,
    host.binding,
    host.locality,
    host.oversubscription,
    host.quota,
    host.memory,
    host.shared_memory,
    host.open_files,
    host.processes,
    host.locked_memory,
    host.huge_pages,
    gpu.gpus,
    gpu.driver,
    gpu.pinned_memory,
    gpu.half_routes,
    network.host_name,
    network.interfaces,
    network.named_interfaces,
    network.rdma,
    network.ucx,
    gpu.gpu_direct,
    storage.run_dir,
    storage.run_dir_speed,
    storage.run_dir_shared,
    launcher.timeline,
)


def examine(facts: DoctorFacts) -> list[Finding]:
    """Run all checks and return their findings. A check that does not apply returns None."""
    found = [check(facts) for check in CHECKS]
    if facts.nccl_log is not None:
        found += [check(facts.nccl_log) for check in nccl_log.CHECKS]
    return [finding for finding in found if finding is not None]
