"""Dense gradients of which few rows are not zero, such as those of an embedding that a batch uses few entries of."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hvdtrain.comm.base import Comm
from hvdtrain.compression.base import Phases
from hvdtrain.errors import JoinedError
from hvdtrain.exchange.bucket import Bucket
from hvdtrain.exchange.buckets import Layout, Named

_LEAST_ROWS, _LEAST_BYTES = 256, 1 << 20
"""Below these, looking for rows costs more than it saves."""
_HALF = 15
"""fp16 holds what is below two to that."""
_NOTHING, _NOT_FINITE = -200, 128
"""Exponents of a gradient of zeros, and of one that holds inf or nan."""
_SCALES = 100
"""The largest exponent of a scale: what is smaller than fp32's normal range is lost."""


class RowBucket(Bucket):
    """The gradient of one parameter: only rows that are not zero on some rank are sent, and summed, where they lie.

    An allgather of which rows they are and how large the largest element is, then an allreduce of these rows. Where
    compression is asked for they travel as fp16, scaled so that their sum fits, whatever the compression. While a rank
    has joined, which has no rows, the whole gradient is summed.

    Args:
        layout: of this parameter alone.
        comm: the ranks.
        factor: what the sum is multiplied by.
        exact: send rows as they are (bfloat16, which Horovod cannot sum, as fp32).
        as_views: as for `Bucket`.

    Attributes:
        count: how many rows some rank has touched in the last exchange: equal on all ranks.
    """

    def __init__(self, layout: Layout, comm: Comm, factor: float = 1.0, *, exact: bool, as_views: bool = True) -> None:
        super().__init__(layout, as_views=as_views)
        self._comm = comm
        self._factor = factor
        dtype = layout.shape.dtype
        self._wire = (torch.float32 if dtype == torch.bfloat16 else dtype) if exact else torch.float16
        self._exact = exact
        self._weight = 1.0
        self.eager = layout.shape.device.type == "cpu"  # how many rows there are, the host has to be told
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
        largest = _largest(gradient)
        mine = largest.nonzero().view(-1)
        exponent = _exponent(float(largest.max()) * abs(self._weight))
        # Below zero, so that it is told from rows; the largest exponent is the smallest of these.
        said = torch.cat([mine.new_tensor([_NOTHING - 1 - exponent]), mine]).int()
        try:
            said = yield self._comm.allgather(said, name=f"{name}/rows")
        except JoinedError:
            whole = gradient.to(self._wire if self._exact else torch.float32) * self._weight
            self._whole = yield self._comm.allreduce(whole, name=f"{name}/all")
            return
        rows = self._rows = torch.unique(said[said >= 0]).long()
        self.count = len(rows)
        if not self.count:
            return
        scale = 1.0
        if not self._exact:
            largest_of_all = _NOTHING - 1 - int(said.min())
            scale = math.ldexp(1.0, min(_SCALES, _HALF - (self._comm.size - 1).bit_length() - largest_of_all))
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
        elif self.count:  # not before: until then a gradient of the user's stays as it was
            self._gradient.index_copy_(0, self._rows, self._values)
        return [self._gradient]


def touched(named: Named) -> dict[str, int]:
    """How many rows of each gradient are not zero, of those parameters that are large enough to ask."""
    return {
        name: 0 if parameter.grad is None else _rows(parameter.grad)
        for name, parameter in named
        if parameter.dim() > 1
        and len(parameter) >= _LEAST_ROWS
        and parameter.numel() * parameter.dtype.itemsize >= _LEAST_BYTES
    }


def _rows(gradient: Tensor) -> int:
    return gradient._indices().shape[1] if gradient.is_sparse else int(_largest(gradient).count_nonzero())


def _largest(gradient: Tensor) -> Tensor:
    """(rows,) the largest magnitude of each; at twice the speed of asking for what is not zero."""
    across = tuple(range(1, gradient.dim()))
    return torch.maximum(gradient.amax(across), -gradient.amin(across))


def _exponent(magnitude: float) -> int:
    """The smallest e with magnitude < 2^e."""
    if not math.isfinite(magnitude):
        return _NOT_FINITE
    return max(_NOTHING, math.frexp(magnitude)[1]) if magnitude else _NOTHING
