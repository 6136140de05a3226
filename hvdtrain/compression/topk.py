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
from hvdtrain.compression import base
from hvdtrain.compression.base import BucketShape, Compressor, Phases
from hvdtrain.compression.sizes import INT16_REACH, topk_plan

_MOST_ROWS = 16
_BITS_AT_ONCE = 4
"""Ranks with bitmaps that are decoded at once on a GPU: 5 bytes of memory for each of them and each element."""


class TopK(Compressor):
    """One allgather of exactly k values and indices per rank, which every rank sums in rank order: equal bits on all.

    The choice is exact. With the bucket as a matrix of b rows, at most k columns have an element among the k largest:
    those with the largest maxima. So columns are chosen first, then their elements, and only about 2 length / b
    elements are read twice. Among equal magnitudes the choice is the same in each run.

    Passes over the bucket, in bytes of fp32: 1 to pack, 1 to find maxima, 1 to clear `out`; the rest is a fraction.

    `share`: of the elements to send.
    """

    def __init__(self, shape: BucketShape, comm: Comm, *, share: float, keep_error: bool = False) -> None:
        super().__init__(shape, comm, keep_error=keep_error)
        self._plan = topk_plan(shape.length, share)
        self._sent = self.add_buffer(self._plan.row_bytes, torch.uint8)
        self._total = None if shape.dtype == torch.float32 else self.add_buffer()
        self._values: list[Tensor] = []
        self._group = 1  # ranks that are decoded at once
        if base.processes_at_once(shape.device):
            self._group = min(comm.size, _BITS_AT_ONCE) if self._plan.coding == "bitmap" else comm.size

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
        for group in torch.split(rows.view(-1, plan.row_bytes), self._group):
            values, coded = self._parts(group)
            indices = decode(plan.coding, coded, plan.count, length).view(-1)
            if len(group) == 1:
                total.index_add_(0, indices, values.view(-1))
            else:  # on a GPU this sums equal indices in rank order, unlike `index_add_`
                total.index_put_((indices,), values.reshape(-1), accumulate=True)
            self._values.append(values)
        if total is not out:
            out.copy_(total)

    def figures(self) -> Tensor | None:
        """Return a sum of all received values times 0: nan and inf are larger than all else, so they are among them."""
        return torch.stack([(values * 0).sum() for values in self._values]).sum().view(1) if self._values else None

    def _parts(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the views of values and encoded indices, in one row or in several."""
        start = 4 * self._plan.count
        return rows[..., :start].view(torch.float32), rows[..., start : start + self._plan.index_bytes]


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
    if not _in_numpy(values):
        best: Tensor = torch.topk(values, count, sorted=False).indices.sort().values
        return best
    chosen = values.numpy().argpartition(len(values) - count)[len(values) - count :]
    chosen.sort()
    return torch.from_numpy(chosen)


def _in_numpy(tensor: Tensor) -> bool:
    """Return whether numpy can read a tensor: it is on a CPU, and has values, unlike those of `hvdtrain fit`."""
    return tensor.device.type == "cpu" and type(tensor) is Tensor


def encode(coding: str, indices: Tensor, coded: Tensor, length: int) -> None:
    """Write ascending int64 `indices` below `length` to `coded`, (bytes,) of uint8, in a format of `sizes.TopKPlan`."""
    if coding == "int32":
        coded.view(torch.int32).copy_(indices)
    elif coding == "int16":
        counts, offsets = _int16(coded, length)
        edges = torch.arange(len(counts) + 1, device=indices.device) * INT16_REACH
        counts.copy_(torch.searchsorted(indices, edges).diff())
        offsets.copy_(indices)  # the low 16 bits
    else:
        # Bit p of byte j is index p * bytes + j, so that whole rows are shifted and joined, not single bits.
        flags = torch.zeros(8 * len(coded), dtype=torch.uint8, device=indices.device)
        flags.index_fill_(0, indices, 1)
        coded.zero_()
        for bit, row in enumerate(flags.view(8, -1)):
            coded.bitwise_or_(row << bit)


def decode(coding: str, coded: Tensor, count: int, length: int) -> Tensor:
    """Return the `count` int64 indices that `encode` has written, of one row or of several. Never waits for a GPU."""
    if coding == "int32":
        return coded.view(torch.int32).long()
    if coding == "int16":
        counts, offsets = _int16(coded, length)
        blocks = (torch.arange(counts.shape[-1], device=coded.device) * INT16_REACH).expand_as(counts).reshape(-1)
        found = blocks.repeat_interleave(counts.reshape(-1).long(), output_size=offsets.numel())
        return found.view(offsets.shape).add_(offsets.long() & (INT16_REACH - 1))
    bits = torch.arange(8, dtype=torch.uint8, device=coded.device)
    flags = ((coded[..., None, :] >> bits[:, None]) & 1).flatten(-2)
    if _in_numpy(coded) and flags.numel() == flags.shape[-1]:
        return torch.from_numpy(flags.view(-1).numpy().nonzero()[0])
    return _nonzero(flags, count)


def _nonzero(flags: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` ones in each row: the n-th is where the running sum reaches n.

    `torch.nonzero` would wait for the GPU to count them.
    """
    wanted = torch.arange(1, count + 1, dtype=torch.int32, device=flags.device).expand(*flags.shape[:-1], count)
    return torch.searchsorted(flags.cumsum(-1, dtype=torch.int32), wanted.contiguous())


def _int16(coded: Tensor, length: int) -> tuple[Tensor, Tensor]:
    split = 4 * -(-length // INT16_REACH)
    return coded[..., :split].view(torch.int32), coded[..., split:].view(torch.int16)
