"""Sparse gradients: the rows that any rank has touched, gathered and added up."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hvdtrain.comm.base import Comm, Handle


class SparseSum:
    """The gradient of one parameter, such as that of ``nn.Embedding(sparse=True)``, under way.

    Every rank sends its rows as they are and adds up those of all in rank order, so that bits are equal.

    Args:
        name: of the collectives.
        parameter: whose gradient it is.
        comm: the ranks.
        sparse_dim: leading dimensions that are sparse.
    """

    def __init__(self, name: str, parameter: nn.Parameter, comm: Comm, sparse_dim: int = 1) -> None:
        self._name = name
        self._parameter = parameter
        self._comm = comm
        self._dim = sparse_dim
        self._handles: tuple[Handle, Handle] | None = None

    @property
    def started(self) -> bool:
        """Whether the exchange of this step has begun."""
        return self._handles is not None

    def begin(self) -> None:
        """Expect another step."""
        self._handles = None

    def start(self, weight: float) -> None:
        """Send the rows times `weight`; none where there is no gradient. Collective: yes."""
        gradient = self._parameter.grad
        rows = _empty(self._parameter, self._dim) if gradient is None else gradient
        if not rows.is_sparse:
            rows = rows.to_sparse(self._dim)
        indices = rows._indices().t().contiguous()
        values = rows._values() * weight if weight != 1.0 else rows._values().contiguous()
        self._handles = (
            self._comm.allgather(indices, name=f"{self._name}/rows"),
            self._comm.allgather(values, name=f"{self._name}/values"),
        )

    def finish(self, factor: float) -> Tensor:
        """Wait; the parameter's gradient is the sum times `factor` then. The values of its rows, a view."""
        assert self._handles is not None
        indices, values = (handle.wait() for handle in self._handles)
        size = self._parameter.shape
        gradient = torch.sparse_coo_tensor(indices.t(), values, size, check_invariants=False).coalesce()
        if factor != 1.0:
            gradient._values().mul_(factor)
        self._parameter.grad = gradient
        return gradient._values()


def zero_rows(parameter: nn.Parameter) -> Tensor:
    """A sparse gradient without rows."""
    return _empty(parameter, 1).coalesce()


def _empty(parameter: nn.Parameter, dim: int) -> Tensor:
    indices = torch.zeros((dim, 0), dtype=torch.int64, device=parameter.device)
    values = parameter.new_zeros((0, *parameter.shape[dim:])).detach()
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)
