"""The bucket of a sparse gradient: the rows of all ranks, gathered and summed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hvdtrain.comm.base import Comm
from hvdtrain.compression.base import Phases
from hvdtrain.exchange.bucket import Bucket
from hvdtrain.exchange.buckets import Layout


class SparseBucket(Bucket):
    """The gradient of one parameter, such as that of ``nn.Embedding(sparse=True)``.

    Every rank sends its rows uncompressed and sums those of all ranks in rank order, so bits are equal on all ranks.

    Args:
        layout: of this parameter alone.
        comm: the ranks.
        factor: applied to the sum.
        sparse_dim: number of leading dimensions that are sparse.
        as_views: as for `Bucket`.
    """

    def __init__(
        self, layout: Layout, comm: Comm, factor: float = 1.0, sparse_dim: int = 1, *, as_views: bool = True
    ) -> None:
        super().__init__(layout, as_views=as_views)
        self._comm = comm
        self._factor = factor
        self._dim = sparse_dim

    def _pack(self, index: int, gradient: Tensor | None, weight: float) -> None:
        rows = _without_rows(self.layout.parameters[0], self._dim) if gradient is None else gradient
        if not rows.is_sparse:
            rows = rows.to_sparse(self._dim)
        self._indices = rows._indices().t().contiguous()
        self._values = rows._values() * weight if weight != 1.0 else rows._values().contiguous()

    def _exchange(self) -> Phases:
        name = self.layout.shape.name
        all_indices = self._comm.allgather(self._indices, name=f"{name}/rows")
        all_values = self._comm.allgather(self._values, name=f"{name}/values")
        indices = yield all_indices
        values = yield all_values
        size = self.layout.parameters[0].shape
        self._sum = torch.sparse_coo_tensor(indices.t(), values, size, check_invariants=False).coalesce()
        if self._factor != 1.0:
            self._sum._values().mul_(self._factor)

    def _sums(self) -> list[Tensor]:
        return [self._sum]


def zero_rows(parameter: nn.Parameter) -> Tensor:
    """Return a sparse gradient without rows."""
    return _without_rows(parameter, 1).coalesce()


def _without_rows(parameter: nn.Parameter, dim: int) -> Tensor:
    indices = torch.zeros((dim, 0), dtype=torch.int64, device=parameter.device)
    values = parameter.new_zeros((0, *parameter.shape[dim:])).detach()
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)
