"""The checks: each a small function of what was gathered, and a line in `CHECKS`."""

from __future__ import annotations

from collections.abc import Callable

from hvdtrain.doctor.checks import gpu, host, installation, launcher, mpi
from hvdtrain.doctor.finding import Finding
from hvdtrain.doctor.gather import Gathered

CHECKS: tuple[Callable[[Gathered], Finding | None], ...] = (
    installation.hvdtrain,
    installation.torch,
    installation.horovod,
    gpu.nccl,
    mpi.libmpi,
    mpi.mpirun,
    launcher.launcher,
    launcher.half_over_gloo,
    installation.packages,
    host.host,
    gpu.gpus,
    launcher.timeline,
)


def examine(facts: Gathered) -> list[Finding]:
    """Run all checks; one that does not apply gives nothing."""
    return [finding for check in CHECKS if (finding := check(facts)) is not None]
