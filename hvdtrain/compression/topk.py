"""Send the largest elements of each bucket; the rest becomes residual.

Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", 2017; Lin et al., "Deep Gradient
Compression", 2018; with error feedback, Stich et al., "Sparsified SGD with Memory", 2018::

    K = the k indices of largest |work|,  k = ceil(share * length)
    out = sum over ranks of (work on K, else 0)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hvdtrain.comm.base import Comm
from hvdtrain.compression.base import BucketShape, Compressor, Phases
from hvdtrain.compression.index_coding import decode, encode
from hvdtrain.compression.sizes import topk_plan

_MOST_ROWS = 16


class TopK(Compressor):
    """One allgather of exactly k values and indices per rank, which every rank sums in rank order: equal bits on all.

    The choice is exact. With the bucket as a matrix of b rows, at most k columns have an element among the k largest:
    those with the largest maxima. So columns are chosen first, then their elements, and only about 2 length / b
    elements are read twice. Among equal magnitudes the choice is the same in each run.

    Passes over the bucket, in bytes of fp32: 1 to pack, 1 to find maxima, 1 to clear `out`; the rest is a fraction.

    Args:
        share: of the elements to send.
    """

    def __init__(self, shape: BucketShape, comm: Comm, *, share: float, keep_error: bool = False) -> None:
        super().__init__(shape, comm, keep_error=keep_error)
        self._plan = topk_plan(shape.length, share)
        self._sent = shape.zeros(self._plan.row_bytes, torch.uint8)
        self._total = None if shape.dtype == torch.float32 else shape.zeros(dtype=torch.float32)
        self._values: list[Tensor] = []

    def make_work(self) -> Tensor:
        """Return a buffer of fp32."""
        return self.shape.zeros(dtype=torch.float32)

    def exchange(self, out: Tensor) -> Phases:
        """Run one allgather."""
        plan, length = self._plan, self.shape.length
        if not plan.count:
            return
        chosen = _largest_indices(self.work, plan.count)
        values, coded = self._parts(self._sent)
        torch.index_select(self.work, 0, chosen, out=values)
        encode(plan.coding, chosen, coded, length)
        if self.keeps_error:
            self.work.index_fill_(0, chosen, 0)
        rows = yield self.comm.allgather(self._sent, name=self.shape.name)
        total = (out if self._total is None else self._total).zero_()
        self._values = []
        for row in rows.view(-1, plan.row_bytes):
            values, coded = self._parts(row)
            total.index_add_(0, decode(plan.coding, coded, plan.count, length), values)
            self._values.append(values)
        if total is not out:
            out.copy_(total)

    def finite(self) -> bool:
        """Whether all received values are finite: nan and inf are larger than all else, so they are among them."""
        return all(bool(torch.isfinite(values.sum())) for values in self._values)

    def buffers(self) -> list[Tensor]:
        """Return the buffers."""
        return [self.work, self._sent, *([] if self._total is None else [self._total])]

    def _parts(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """Return the views of values and encoded indices in a row."""
        start = 4 * self._plan.count
        return row[:start].view(torch.float32), row[start : start + self._plan.index_bytes]


def _largest_indices(flat: Tensor, count: int) -> Tensor:
    """Return the `count` indices of largest magnitude, ascending."""
    length = len(flat)
    rows = min(math.isqrt(length // count), _MOST_ROWS)
    if rows < 2:
        return _largest(flat.abs(), count)
    columns = length // rows
    matrix = flat[: rows * columns].view(rows, columns)
    best = _largest(_maxima(matrix), count)
    candidates = torch.cat([matrix.index_select(1, best).view(-1), flat[rows * columns :]]).abs_()
    chosen = _largest(candidates, count)
    # Candidates are in row order, and those outside the matrix come last. So the choice ascends in `flat` too.
    inside = chosen.div(count, rounding_mode="floor") * columns + best[chosen.remainder(count)]
    return torch.where(chosen < rows * count, inside, chosen + rows * (columns - count))


def _maxima(matrix: Tensor) -> Tensor:
    """Return the largest magnitude in each column."""
    found = matrix[0].abs()  # row by row: amax and amin of the matrix take 1.5 times as long
    magnitudes = torch.empty_like(found)
    for row in matrix[1:]:
        torch.maximum(found, torch.abs(row, out=magnitudes), out=found)
    return found


def _largest(values: Tensor, count: int) -> Tensor:
    """Return the ascending indices of the `count` largest values; nan is largest.

    On a CPU, numpy selects in a tenth of torch's time.
    """
    if values.device.type != "cpu":
        best: Tensor = torch.topk(values, count, sorted=False).indices.sort().values
        return best
    chosen = values.numpy().argpartition(len(values) - count)[len(values) - count :]
    chosen.sort()
    return torch.from_numpy(chosen)
