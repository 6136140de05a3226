"""Sum 16-bit floats in fp32: each rank owns a shard of a bucket."""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from hvdtrain.comm.base import Comm, Handle
from hvdtrain.compression.base import BucketShape
from hvdtrain.compression.chunks import pieces
from hvdtrain.compression.sizes import shard_length


class Owners:
    """An alltoall of shards, their sums in fp32 in rank order, and an allgather of the rounded sums.

    Args:
        shape: of the bucket.
        comm: the ranks.
        dtype: 16-bit dtype of the payload.

    Attributes:
        padded: elements of the bucket, padded to equal shards.
    """

    def __init__(self, shape: BucketShape, comm: Comm, dtype: torch.dtype) -> None:
        self._name, self._comm = shape.name, comm
        self._shard = shard_length(shape.length, comm.size)
        self.padded = self._shard * comm.size
        self._mine = shape.zeros(self._shard, dtype)
        self._sum = torch.zeros_like(self._mine, dtype=torch.float32)

    def sum(self, wire: Tensor, error: Tensor | None = None, unit: float = 1.0) -> Generator[Handle, Tensor, Tensor]:
        """Return the sums: (padded,) of the 16-bit dtype. Collective: yes.

        Args:
            wire: (padded,) this rank's part.
            error: (padded,) buffer to which `unit` times the rounding error of this rank's shard is added.
            unit: see `error`.
        """
        rows = (yield self._comm.alltoall(wire, name=f"{self._name}/shares")).view(-1, self._shard)
        owned = error.view(-1, self._shard)[self._comm.rank] if error is not None else None
        for piece in pieces(self._shard, rows):
            total = self._sum[piece].copy_(rows[0, piece])
            for row in rows[1:]:
                total.add_(row[piece])
            self._mine[piece].copy_(total)
            if owned is not None:
                owned[piece].add_(total.sub_(self._mine[piece]), alpha=unit)
        return (yield self._comm.allgather(self._mine, name=f"{self._name}/sums"))

    def buffers(self) -> list[Tensor]:
        """Return the buffers."""
        return [self._mine, self._sum]
