"""Measuring what a choice of compression depends on: the link, and what coding costs here."""

from __future__ import annotations

import torch
from torch import Tensor

from hvdtrain.comm.base import Comm
from hvdtrain.comm.link_probe import allreduce_s, timed
from hvdtrain.comm.solo import SoloComm
from hvdtrain.compression.base import BucketShape, drive
from hvdtrain.compression.table import Compression

_SMALL, _LARGE = 1 << 8, 1 << 21
"""Elements of fp32: 1 KiB, and 8 MiB, which takes 70 ms at 1 Gbit/s."""
_TIMES = 3


def link(comm: Comm, device: torch.device) -> tuple[float, float]:
    """Latency of a small allreduce in seconds, and bytes a second that a rank sends in a large one. Collective: yes."""
    latency_s, large_s = (allreduce_s(comm, device, n, _TIMES, f"trial/{n}") for n in (_SMALL, _LARGE))
    sent = 4 * _LARGE * 2 * (comm.size - 1) / comm.size
    return latency_s, sent / max(large_s - latency_s, 1e-9)


def cost_s(compression: Compression, shape: BucketShape, gradients: list[Tensor]) -> float:
    """Seconds that packing, coding and decoding one bucket take here.

    Args:
        compression: as it would be used.
        shape: of the bucket.
        gradients: of its parts; not changed.
    """
    compressor = compression.load()(shape, SoloComm())
    out = shape.zeros()

    def once() -> None:
        for index, gradient in enumerate(gradients):
            compressor.pack(index, gradient)
        drive(compressor.exchange(out))
        compressor.commit(applied=True)

    once()  # the first touches fresh memory
    return min(timed(once, shape.device) for _ in range(_TIMES))
