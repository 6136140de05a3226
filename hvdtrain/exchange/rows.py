"""Buckets of one gradient with few non-zero rows, such as that of an embedding: dense, or sparse as torch makes it."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from hvdtrain.comm.base import Comm
from hvdtrain.compression.base import Phases
from hvdtrain.errors import JoinedError
from hvdtrain.exchange.bucket import Bucket
from hvdtrain.exchange.buckets import Layout, Named, as_gradient, as_real

_MIN_ROWS, _MIN_BYTES = 256, 1 << 20
"""In smaller gradients, searching for rows costs more than it saves."""
_FP16_EXPONENT = 15
"""fp16 holds numbers below two to this power."""
_ZERO, _NOT_FINITE = -200, 128
"""Exponents of a gradient of zeros, and of one with inf or nan."""
_MAX_SCALE = 100
"""The largest exponent of a scale. Values below fp32's normal range are lost."""


class RowBucket(Bucket):
    """The dense gradient of one parameter. Only rows that are not zero on some rank are sent and summed.

    An allgather of the row numbers and of the largest magnitude, then an allreduce of these rows. With any compression
    rows are sent as fp16, scaled so that their sum fits. After a rank has joined, the whole gradient is summed, because
    that rank has no rows.

    Args:
        exact: send rows uncompressed (bfloat16 as fp32, because Horovod cannot sum it).

    Attributes:
        count: rows that were not zero on some rank in the last exchange. Equal on all ranks.
    """

    def __init__(self, layout: Layout, factor: float, comm: Comm, *, exact: bool, as_views: bool) -> None:
        super().__init__(layout, factor, as_views=as_views)
        self._comm = comm
        dtype = layout.shape.dtype
        self._wire = (torch.float32 if dtype == torch.bfloat16 else dtype) if exact else torch.float16
        self._exact = exact
        self._weight = 1.0
        self.eager = layout.shape.device.type == "cpu"  # on a GPU, the host waits for the number of rows
        self.count = 0
        self._whole: Tensor | None = None

    def _pack(self, index: int, gradient: Tensor | None, weight: float) -> None:
        if gradient is None or gradient.is_sparse:
            zeros = torch.zeros_like(self.layout.parameters[0])
            gradient = zeros if gradient is None else zeros.add_(gradient)
        self._gradient = gradient
        self._weight = weight

    def _exchange(self) -> Phases:
        name, gradient = self.layout.shape.name, self._gradient
        self.count, self._whole = 0, None
        largest = _largest_by_row(gradient)
        own_rows = largest.nonzero().view(-1)
        exponent = _exponent(float(largest.max()) * abs(self._weight))
        # The exponent is sent as a negative number, unlike rows. The smallest of these is the largest exponent.
        header = torch.cat([own_rows.new_tensor([_ZERO - 1 - exponent]), own_rows]).int()
        try:
            headers = yield self._comm.allgather(header, name=f"{name}/rows")
        except JoinedError:
            whole = gradient.to(self._wire if self._exact else torch.float32) * self._weight
            self._whole = yield self._comm.allreduce(whole, name=f"{name}/all")
            return
        rows = self._rows = torch.unique(headers[headers >= 0]).long()
        self.count = len(rows)
        if not self.count:
            return
        scale = 1.0
        if not self._exact:
            largest_exponent = _ZERO - 1 - int(headers.min())
            fitting = _FP16_EXPONENT - (self._comm.size - 1).bit_length() - largest_exponent
            scale = math.ldexp(1.0, min(_MAX_SCALE, fitting))
        values = gradient.index_select(0, rows)
        if (before := self._weight * scale) != 1.0:
            values.mul_(before)
        wire = yield self._comm.allreduce(values.to(self._wire), name=f"{name}/values")
        values.copy_(wire)
        if (after := self._factor / scale) != 1.0:
            values.mul_(after)
        self._values = values

    def _sums(self) -> list[Tensor]:
        if self._whole is not None:
            self._gradient.copy_(self._whole.mul_(self._factor))
        elif self.count:  # only now: a gradient of the user must not change before
            self._gradient.index_copy_(0, self._rows, self._values)
        return [self._gradient]


class SparseBucket(Bucket):
    """The gradient of one parameter, such as that of ``nn.Embedding(sparse=True)``.

    Every rank sends its rows uncompressed and sums those of all ranks in rank order, so bits are equal on all ranks.
    """

    def __init__(self, layout: Layout, factor: float, comm: Comm, *, as_views: bool) -> None:
        super().__init__(layout, factor, as_views=as_views)
        self._comm = comm

    def _pack(self, index: int, gradient: Tensor | None, weight: float) -> None:
        rows = zero_rows(self.layout.parameters[0]) if gradient is None else gradient
        if not rows.is_sparse:
            rows = rows.to_sparse(1)
        self._indices = rows._indices().t().contiguous()
        self._values = as_real(rows._values() * weight if weight != 1.0 else rows._values().contiguous())

    def _exchange(self) -> Phases:
        name = self.layout.shape.name
        all_indices = self._comm.allgather(self._indices, name=f"{name}/rows")
        all_values = self._comm.allgather(self._values, name=f"{name}/values")
        indices = yield all_indices
        values = yield all_values
        parameter = self.layout.parameters[0]
        values = as_gradient(values, parameter)
        self._sum = torch.sparse_coo_tensor(indices.t(), values, parameter.shape, check_invariants=False).coalesce()
        if self._factor != 1.0:
            self._sum._values().mul_(self._factor)

    def _sums(self) -> list[Tensor]:
        return [self._sum]


def zero_rows(parameter: nn.Parameter) -> Tensor:
    """Return a sparse gradient without rows."""
    indices = torch.zeros((1, 0), dtype=torch.int64, device=parameter.device)
    values = parameter.new_zeros((0, *parameter.shape[1:])).detach()
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False).coalesce()


def count_rows(named: Named) -> dict[str, int]:
    """Return the number of non-zero rows of each gradient, for real parameters that are large enough to count them."""
    return {
        name: 0 if parameter.grad is None else _rows(parameter.grad)
        for name, parameter in named
        if parameter.dim() > 1
        and not parameter.is_complex()
        and len(parameter) >= _MIN_ROWS
        and parameter.numel() * parameter.dtype.itemsize >= _MIN_BYTES
    }


def _rows(gradient: Tensor) -> int:
    return gradient._indices().shape[1] if gradient.is_sparse else int(_largest_by_row(gradient).count_nonzero())


def _largest_by_row(gradient: Tensor) -> Tensor:
    """Return (rows,) the largest magnitude of each row, in half the time of comparing elements with zero."""
    across = tuple(range(1, gradient.dim()))
    return torch.maximum(gradient.amax(across), -gradient.amin(across))


def _exponent(magnitude: float) -> int:
    """Return the smallest e with magnitude < 2^e."""
    if not math.isfinite(magnitude):
        return _NOT_FINITE
    return max(_ZERO, math.frexp(magnitude)[1]) if magnitude else _ZERO
