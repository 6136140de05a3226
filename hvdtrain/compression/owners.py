"""Halves that are summed in fp32: each rank owns a share of a bucket."""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from hvdtrain.comm.base import Comm, Handle
from hvdtrain.compression.base import BucketShape
from hvdtrain.compression.chunks import pieces
from hvdtrain.compression.sizes import share


class Owners:
    """An alltoall of shares, their sums in rank order in fp32, an allgather of the rounded sums.

    Args:
        shape: of the bucket.
        comm: the ranks.
        dtype: of two bytes, of what travels.

    Attributes:
        padded: elements of what is sent: the bucket, padded to equal shares.
    """

    def __init__(self, shape: BucketShape, comm: Comm, dtype: torch.dtype) -> None:
        self._name, self._comm = shape.name, comm
        self._share = share(shape.length, comm.size)
        self.padded = self._share * comm.size
        self._mine = shape.zeros(self._share, dtype)
        self._sum = torch.zeros_like(self._mine, dtype=torch.float32)

    def summed(self, wire: Tensor, left: Tensor | None = None, unit: float = 1.0) -> Generator[Handle, Tensor, Tensor]:
        """The sums: (padded,) of the dtype that travels. Collective: yes.

        Args:
            wire: (padded,), what this rank adds.
            left: (padded,), to which `unit` times what rounding takes from the sums of this rank's share is added.
            unit: see `left`.
        """
        rows = (yield self._comm.alltoall(wire, name=f"{self._name}/shares")).view(-1, self._share)
        owned = left.view(-1, self._share)[self._comm.rank] if left is not None else None
        for piece in pieces(self._share, rows):
            total = self._sum[piece].copy_(rows[0, piece])
            for row in rows[1:]:
                total.add_(row[piece])
            self._mine[piece].copy_(total)
            if owned is not None:
                owned[piece].add_(total.sub_(self._mine[piece]), alpha=unit)
        return (yield self._comm.allgather(self._mine, name=f"{self._name}/sums"))

    def buffers(self) -> list[Tensor]:
        """The memory it takes."""
        return [self._mine, self._sum]
