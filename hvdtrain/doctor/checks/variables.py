"""Variables that somebody set for another purpose and that are still there. Our own settings yield to them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from hvdtrain.doctor.facts import Gathered
from hvdtrain.doctor.finding import Finding


@dataclass(frozen=True)
class Leftover:
    """A variable that does harm: ``hurts`` its value, or with `only_gpu` that value where there are GPUs."""

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
        "a thread of rank 0 is busy, GPUs are waited for at each exchange, and a file gets gigabytes in a long run",
    ),
    Leftover("HOROVOD_LOG_LEVEL", _one_of("trace", "debug"), "Horovod writes lines for each tensor of each step"),
    Leftover(
        "HOROVOD_FUSION_THRESHOLD",
        _other_than("0"),
        "gradients lie in flat buckets already: Horovod copies them twice more, and timing decides what it sums first",
    ),
    Leftover("HOROVOD_CACHE_CAPACITY", _one_of("0"), "all ranks negotiate each tensor anew in each step"),
    Leftover("HOROVOD_AUTOTUNE", _on, "its trials make steps slower, and its measure is off by some 8%"),
    Leftover(
        "HOROVOD_ENABLE_ASYNC_COMPLETION",
        _on,
        "the device's default stream then waits for each exchange, and backward runs on it",
        only_gpu=True,
    ),
    Leftover("THP_MEM_ALLOC_ENABLE", _off, "an exchange of 33.5 MB takes 4.9 to 5.4 ms, with huge pages 3.5 to 3.7"),
    Leftover("CUDA_LAUNCH_BLOCKING", _on, "each kernel is waited for: nothing overlaps", only_gpu=True),
    Leftover("NCCL_P2P_DISABLE", _on, "GPUs of one host exchange by its memory, not by their link", only_gpu=True),
    Leftover("NCCL_SHM_DISABLE", _on, "GPUs of one host without a link exchange by the network", only_gpu=True),
    Leftover("NCCL_IB_DISABLE", _on, "hosts exchange by TCP and the CPU, not by InfiniBand or RoCE", only_gpu=True),
    Leftover("NCCL_NET_GDR_LEVEL", _one_of("0", "loc"), "network cards do not reach GPU memory", only_gpu=True),
    Leftover("NCCL_DEBUG", _one_of("trace"), "NCCL writes lines for each call", only_gpu=True),
)


def leftovers(facts: Gathered) -> Finding | None:
    """Name variables that make training slow, or fill the disk."""
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


def shared_memory_off(facts: Gathered) -> Finding | None:
    """See that Open MPI may use shared memory between ranks of a host."""
    value = facts.environ.get("OMPI_MCA_btl") or facts.mpi.site.get("OMPI_MCA_btl", ("", None))[0]
    library = facts.mpi.library
    if not value or library is None or library.family != "openmpi" or _allows_shared_memory(value):
        return None
    why = "ranks of one host talk by TCP, as if they were on two"
    return Finding("btl", "warning", f"OMPI_MCA_btl={value}", why, "OMPI_MCA_btl=^openib, or unset it")


def _allows_shared_memory(value: str) -> bool:
    shared: Collection[str] = ("vader", "sm")
    names = value.lstrip("^").split(",")
    return not any(name in names for name in shared) if value.startswith("^") else any(n in names for n in shared)
