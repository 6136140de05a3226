"""Checks of environment variables that slow training down. They take precedence over the settings of hvdtrain."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from hvdtrain.doctor.facts import DoctorFacts
from hvdtrain.doctor.finding import Finding


@dataclass(frozen=True)
class Leftover:
    """A harmful variable: ``hurts`` tells whether its value harms; with `only_gpu`, only on machines with GPUs."""

    name: str
    hurts: Callable[[str], bool]
    why: str
    only_gpu: bool = False


def _on(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "false", "off", "no")


def _off(value: str) -> bool:
    return not _on(value)


def _one_of(*words: str) -> Callable[[str], bool]:
    return lambda value: value.strip().lower() in words


def _other_than(*words: str) -> Callable[[str], bool]:
    return lambda value: value.strip().lower() not in words


_LEFTOVERS = (
    Leftover(
        "HOROVOD_TIMELINE",
        _on,
        "a thread of rank 0 is busy, each exchange waits for the GPU, and a long run writes a file of gigabytes",
    ),
    Leftover("HOROVOD_LOG_LEVEL", _one_of("trace", "debug"), "Horovod logs every tensor of every step"),
    Leftover(
        "HOROVOD_FUSION_THRESHOLD",
        _other_than("0"),
        "gradients are already in flat buckets: Horovod copies them twice more, and sums depend on timing",
    ),
    Leftover("HOROVOD_CACHE_CAPACITY", _one_of("0"), "all ranks negotiate every tensor again in every step"),
    Leftover("HOROVOD_AUTOTUNE", _on, "its trials slow steps down, and its measurement is off by about 8%"),
    Leftover(
        "HOROVOD_ENABLE_ASYNC_COMPLETION",
        _on,
        "the default stream of the device, which runs backward, waits for each exchange",
        only_gpu=True,
    ),
    Leftover("THP_MEM_ALLOC_ENABLE", _off, "exchanges of large tensors take 1.4 times as long as with huge pages"),
    Leftover("CUDA_LAUNCH_BLOCKING", _on, "the CPU waits for each kernel: nothing overlaps", only_gpu=True),
    Leftover(
        "NCCL_P2P_DISABLE",
        _on,
        "GPUs of one host exchange data through host memory instead of their link",
        only_gpu=True,
    ),
    Leftover("NCCL_SHM_DISABLE", _on, "GPUs of one host without a link exchange data over the network", only_gpu=True),
    Leftover("NCCL_IB_DISABLE", _on, "hosts exchange data over TCP instead of InfiniBand or RoCE", only_gpu=True),
    Leftover(
        "NCCL_NET_GDR_LEVEL", _one_of("0", "loc"), "network cards cannot access GPU memory directly", only_gpu=True
    ),
    Leftover("NCCL_DEBUG", _one_of("trace"), "NCCL logs every call", only_gpu=True),
)


def leftovers(facts: DoctorFacts) -> Finding | None:
    """Warn of variables that slow training down or fill the disk."""
    gpus = bool(facts.installation.torch.values.get("gpus"))
    found = [
        (leftover, facts.environ[leftover.name])
        for leftover in _LEFTOVERS
        if leftover.name in facts.environ and (gpus or not leftover.only_gpu)
    ]
    bad = [(leftover, value) for leftover, value in found if leftover.hurts(value)]
    if not bad:
        return None
    text = ", ".join(f"{leftover.name}={value}" for leftover, value in bad)
    why = "; ".join(f"{leftover.name}: {leftover.why}" for leftover, _ in bad)
    return Finding("variables", "warning", text, why, "unset " + " ".join(leftover.name for leftover, _ in bad))


def shared_memory_off(facts: DoctorFacts) -> Finding | None:
    """Check that Open MPI may use shared memory between ranks of a host."""
    value = facts.environ.get("OMPI_MCA_btl") or facts.mpi.site.get("OMPI_MCA_btl", ("", None))[0]
    library = facts.mpi.library
    if not value or library is None or library.family != "openmpi" or _allows_shared_memory(value):
        return None
    why = "ranks on one host communicate over TCP instead of shared memory"
    return Finding("btl", "warning", f"OMPI_MCA_btl={value}", why, "set OMPI_MCA_btl=^openib, or unset it")


def _allows_shared_memory(value: str) -> bool:
    shared: Collection[str] = ("vader", "sm")
    names = value.lstrip("^").split(",")
    return not any(name in names for name in shared) if value.startswith("^") else any(n in names for n in shared)
