"""Checks of environment variables that slow training down. They take precedence over the settings of hvdtrain."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.doctor.facts import DoctorFacts
from hvdtrain.doctor.finding import Finding

_OFF = ("", "0", "false", "off", "no")


@dataclass(frozen=True)
class _Leftover:
    """A variable with harmful values: those in `harmful`, or without these all but `harmless`."""

    name: str
    why: str
    harmful: tuple[str, ...] = ()
    harmless: tuple[str, ...] = _OFF
    only_gpu: bool = False

    def hurts(self, value: str) -> bool:
        word = value.strip().lower()
        return word in self.harmful if self.harmful else word not in self.harmless


_LEFTOVERS = (
    _Leftover(
        "HOROVOD_TIMELINE",
        "a thread of rank 0 is busy, each exchange waits for the GPU, and a long run writes a file of gigabytes",
    ),
    _Leftover("HOROVOD_LOG_LEVEL", "Horovod logs every tensor of every step", harmful=("trace", "debug")),
    _Leftover(
        "HOROVOD_FUSION_THRESHOLD",
        "gradients are already in flat buckets: Horovod copies them twice more, and sums depend on timing",
        harmless=("0",),
    ),
    _Leftover("HOROVOD_CACHE_CAPACITY", "all ranks negotiate every tensor again in every step", harmful=("0",)),
    _Leftover("HOROVOD_AUTOTUNE", "its trials slow steps down, and its measurement is off by about 8%"),
    _Leftover(
        "HOROVOD_ENABLE_ASYNC_COMPLETION",
        "hvdtrain refuses it on GPUs: gradients would be used before their exchange is complete",
        only_gpu=True,
    ),
    _Leftover("THP_MEM_ALLOC_ENABLE", "exchanges of large tensors take 1.4 times as long as with huge pages", _OFF),
    _Leftover("CUDA_LAUNCH_BLOCKING", "the CPU waits for each kernel: nothing overlaps", only_gpu=True),
    _Leftover(
        "NCCL_P2P_DISABLE", "GPUs of one host exchange data through host memory instead of their link", only_gpu=True
    ),
    _Leftover("NCCL_SHM_DISABLE", "GPUs of one host without a link exchange data over the network", only_gpu=True),
    _Leftover("NCCL_IB_DISABLE", "hosts exchange data over TCP instead of InfiniBand or RoCE", only_gpu=True),
    _Leftover(
        "NCCL_NET_GDR_LEVEL", "network cards cannot access GPU memory directly", harmful=("0", "loc"), only_gpu=True
    ),
    _Leftover("NCCL_DEBUG", "NCCL logs every call", harmful=("trace",), only_gpu=True),
)


def leftovers(facts: DoctorFacts) -> Finding | None:
    """Warn of variables that slow training down or fill the disk."""
    gpus = bool(facts.installation.torch.values.get("gpus"))
    rows = [row for row in _LEFTOVERS if row.name in facts.environ and (gpus or not row.only_gpu)]
    bad = [row for row in rows if row.hurts(facts.environ[row.name])]
    if not bad:
        return None
    text = ", ".join(f"{row.name}={facts.environ[row.name]}" for row in bad)
    why = "; ".join(f"{row.name}: {row.why}" for row in bad)
    return Finding("variables", "warning", text, why, "unset " + " ".join(row.name for row in bad))


def shared_memory_off(facts: DoctorFacts) -> Finding | None:
    """Check that Open MPI may use shared memory between ranks of a host."""
    value = facts.environ.get("OMPI_MCA_btl") or facts.mpi.site.get("OMPI_MCA_btl", ("", None))[0]
    library = facts.mpi.library
    if not value or library is None or library.family != "openmpi":
        return None
    shared = any(name in ("vader", "sm") for name in value.lstrip("^").split(","))
    if shared != value.startswith("^"):
        return None
    why = "ranks on one host communicate over TCP instead of shared memory"
    return Finding("btl", "warning", f"OMPI_MCA_btl={value}", why, "set OMPI_MCA_btl=^openib, or unset it")
