"""Sum gradients at the owners of their rows in one order on any number of ranks: ZeRO-1 and ZeRO-2."""

from __future__ import annotations

import torch
from torch import Tensor

from hvdtrain.compression.base import Phases
from hvdtrain.exchange.in_order import Leaves, PassSums, add_all_nodes, by_owner
from hvdtrain.exchange.shard_bucket import ShardBucket, Shared


class InOrderShardBucket(ShardBucket):
    """The rest of the tree at the owners of rows: each gets the nodes of all ranks in an all-to-all.

    Args:
        shared: as of `ShardBucket`.
        leaves: this rank's passes.
        each_pass: whether a pass is summed by itself. Then its micro-batches, one a rank, are neighbours.
    """

    def __init__(self, shared: Shared, leaves: Leaves, *, each_pass: bool) -> None:
        self._leaves, self._each_pass = leaves, each_pass
        super().__init__(shared)
        self._sum_dtype = torch.promote_types(self._sum_dtype, torch.float32)
        self.clear()

    def clear(self) -> None:  # noqa: D102
        super().clear()
        self._nodes: list[Tensor] = []  # what this rank sends, by node
        self._passes: PassSums | None = None

    def _pack(self, index: int, gradient: Tensor | None, weight: float) -> None:
        assert weight == 1.0
        self._check_dense(index, gradient)
        shape = self.layout.shape
        sums = [gradient] if self._each_pass else self._leaves.nodes_with(shape.parts[index].name, gradient)
        while len(self._nodes) < len(sums):
            self._nodes.append(torch.empty(shape.length, dtype=self._sum_dtype, device=shape.device))
        for total, node in zip(sums, self._nodes, strict=True):
            for shard in self._by_index.get(index, ()):
                view = shard.part.view(node)
                if total is None:
                    view.zero_()
                else:
                    view.copy_(shard.rows.of(total))

    def _exchange(self) -> Phases:
        if not self.is_trained:
            return
        positions, shape, size = self._leaves.positions, self.layout.shape, self._comm.size
        sent, self._nodes = self._nodes, []
        received = yield self._comm.alltoall(
            by_owner(sent, size, self._segment, like=(self._sum_dtype, shape.device)),
            name=shape.name,
            rows=[len(sent)] * size,
        )
        if self._each_pass:
            self._passes = self._passes or PassSums(positions)
            self._passes.add(received)
        else:
            self._summed = add_all_nodes(received, positions).clone()  # the rest of what was received is freed

    def _sums(self) -> list[Tensor]:
        if self._passes is not None:
            self._summed = self._passes.total
        return super()._sums()

    @property
    def kept_bytes(self) -> int:  # type: ignore[override]  # noqa: D102
        return super().kept_bytes if self._passes is None else self._passes.nbytes

    def buffers(self) -> list[Tensor]:  # noqa: D102
        return [*super().buffers(), *self._nodes]
