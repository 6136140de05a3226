"""Gradients as they are, or cast to 16 bits (Micikevicius et al., "Mixed Precision Training", 2018)."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from hvdtrain.comm.base import Comm, Handle
from hvdtrain.compression import base
from hvdtrain.compression.base import BucketShape, Compressor, Phases
from hvdtrain.compression.sizes import shard_length
from hvdtrain.errors import JoinedError

_BACK_OFF = 4  # powers of two by which the scale shrinks after a sum that is not finite
_LARGEST = 8
"""The scale brings the largest magnitude of a sum to just below two to this power. Parts and later steps may be 2^8
times as large, and a value of 2^-22 of it is still a normal fp16 number."""
_CHECK_EVERY = 16  # steps between two searches for the largest magnitude
_AFTER_ZEROS = 10  # the scale's exponent after a sum of zeros: later gradients up to 64 still fit
_RANGE = (-40, 24)  # limits of the scale's exponent
_PIECE = 32 << 10
"""Elements: 128 KiB of fp32, so that several pieces fit in an L2 cache of 1 MiB. A call costs about 2 us, a tenth of an
operation on one piece."""


def fp16(shape: BucketShape, comm: Comm) -> Compressor:
    """Make the compressor of fp16; bfloat16 gradients stay bfloat16, because fp16 lacks their range."""
    return (Bf16 if shape.dtype == torch.bfloat16 else Fp16)(shape, comm)


def fp16_by_owners(shape: BucketShape, comm: Comm) -> Compressor:
    """Make the compressor of fp16 for a slow allreduce of 16-bit floats."""
    return (Bf16 if shape.dtype == torch.bfloat16 else Fp16ByOwners)(shape, comm)


class Plain(Compressor):
    """No compression: one allreduce in place.

    It sums in the dtype of the gradients; bfloat16 in fp32, because Horovod cannot sum it (horovod/horovod#4047).
    """

    def make_work(self) -> Tensor:  # noqa: D102
        return self.shape.zeros(dtype=torch.float32 if self.shape.dtype == torch.bfloat16 else None)

    def exchange(self, out: Tensor) -> Phases:
        """One allreduce."""
        yield self.comm.allreduce(self.work, name=self.shape.name)
        if out is not self.work:
            out.copy_(self.work)


class Fp16(Compressor):
    """One allreduce of ``h = fp16(s g)``; ``out = sum(h) / s``.

    ``s = 2^e``, so that scaling rounds only values below fp16's normal range. At first e is -ceil(log2 size): a sum is
    in range if its parts are. Then e follows the largest magnitude of the sums, which is searched every 16 steps and
    after each sum that was not finite. Such a sum, which all ranks have, reduces e by 4.

    Passes over the bucket, in bytes of fp32: 1/2 to pack (written; the gradient is in the cache), 1 1/2 to unpack (its
    check for overflow reads the cache).

    `scale`: s, by which gradients are multiplied.
    """

    def __init__(self, shape: BucketShape, comm: Comm) -> None:
        super().__init__(shape, comm)
        count = len(list(pieces(shape.length, self.work)))
        self._sums = shape.zeros(count, torch.float32)  # in fp32: an fp16 sum of finite values may be infinite
        self._lows, self._highs = shape.zeros(count), shape.zeros(count)
        self._first = -(comm.size - 1).bit_length()
        self._set(self._first, 0)

    def _set(self, exponent: int, steps: int) -> None:
        """Set the exponent, and the number of steps since the last search for the largest magnitude."""
        low, high = _RANGE
        self._exponent, self._steps = max(low, min(high, exponent)), steps
        self.scale = math.ldexp(1.0, self._exponent)

    def make_work(self) -> Tensor:  # noqa: D102
        return self.shape.zeros(dtype=torch.float16)

    def pack(self, index: int, gradient: Tensor | None, weight: float = 1.0) -> None:
        """Pack the scaled gradient."""
        super().pack(index, gradient, weight * self.scale)

    def exchange(self, out: Tensor) -> Phases:
        """Sum, scale back."""
        sums = yield from self._exchange_sums()
        for number, piece in enumerate(pieces(self.shape.length, out)):
            # torch.mul(out=) would round the product to fp16.
            summed = out[piece].copy_(sums[piece]).mul_(1 / self.scale)
            if self._steps == 0:
                torch.aminmax(summed, out=(self._lows[number], self._highs[number]))
            torch.sum(summed, 0, dtype=torch.float32, out=self._sums[number])

    def _exchange_sums(self) -> Generator[Handle, Tensor, Tensor]:
        yield self.comm.allreduce(self.work, name=self.shape.name)
        return self.work

    @property
    def _searches(self) -> bool:
        """Whether this step searches for the largest magnitude."""
        return self._steps == 0 and self.shape.length > 0

    def figures(self) -> Tensor:
        """Return the sums of the pieces times 0, and in a step that searches for it the largest magnitude."""
        zero_if_finite = (self._sums * 0).sum().view(1)
        if not self._searches:
            return zero_if_finite
        return torch.cat([zero_if_finite, torch.maximum(-self._lows, self._highs).max().float().view(1)])

    def commit(self, figures: Sequence[float], *, applied: bool) -> None:
        """Adapt the scale, after a sum that is not finite even if the step was skipped."""
        if not base.is_finite(figures):
            self._set(self._exponent - _BACK_OFF, 0)
        elif applied:
            searched = self._searches
            largest = figures[1] if searched else None
            if largest:
                self._set(_LARGEST - math.frexp(largest)[1], 1)
            elif searched and self._exponent < _AFTER_ZEROS:
                # The sum is zero: values were too small for the first scale, or for the one after inf or nan.
                self._set(_AFTER_ZEROS, 0)
            else:
                self._set(self._exponent, (self._steps + 1) % _CHECK_EVERY)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the scale's exponent and the number of steps since the last search for the largest magnitude."""
        state = torch.tensor([self._exponent, self._steps])
        return {f"{part.name}/fp16_scale": state.clone() for part in self.shape.parts}

    def load_state_dict(self, state: Mapping[str, Tensor], ranks: int) -> None:
        """Load the smallest scale of the bucket's parameters."""
        found = [state[key] for part in self.shape.parts if (key := f"{part.name}/fp16_scale") in state]
        exponent, steps = min(tensor.tolist() for tensor in found) if found else (self._first, 0)
        self._set(exponent, steps)


class _ByOwners(Compressor):
    """Sums 16-bit floats in fp32 in rank order: an alltoall of shards to their owners, an allgather of rounded sums."""

    dtype: torch.dtype

    def __init__(self, shape: BucketShape, comm: Comm) -> None:
        super().__init__(shape, comm)
        self._shard = len(self.work) // comm.size
        self._mine = self.add_buffer(self._shard, self.dtype)
        self._sum = self.add_buffer(self._shard)

    def make_work(self) -> Tensor:
        return self.shape.zeros(shard_length(self.shape.length, self.comm.size) * self.comm.size, self.dtype)

    def _sum_shards(self) -> Generator[Handle, Tensor, Tensor]:
        rows = (yield self.comm.alltoall(self.work, name=f"{self.shape.name}/shares")).view(-1, self._shard)
        for piece in pieces(self._shard, rows):
            sum_rows(rows[:, piece], self._sum[piece])
            self._mine[piece].copy_(self._sum[piece])
        return (yield self.comm.allgather(self._mine, name=f"{self.shape.name}/sums"))


class Fp16ByOwners(_ByOwners, Fp16):
    """fp16 summed in fp32 by owners of shards: for Gloo on CPUs, which sums fp16 in software, one by one.

    Passes over the bucket in addition to those of `Fp16`, in bytes of fp32: 1 to sum.
    """

    dtype = torch.float16

    def _exchange_sums(self) -> Generator[Handle, Tensor, Tensor]:
        if not self.shape.length:
            return self.work
        try:
            return (yield from self._sum_shards())
        except JoinedError:  # a rank that has joined owns no shard
            return (yield from super()._exchange_sums())


class Bf16(_ByOwners):
    """bfloat16 summed in fp32 by owners: an alltoall of shards, then an allgather of the rounded sums.

    ``out = bf16(sum over ranks of fp32(bf16(g)))``, on CPUs in rank order. The rounding of two casts at any size.

    Passes over the bucket, in bytes of fp32: 1/2 to pack, 1 to sum, 1 1/2 to unpack.
    """

    dtype = torch.bfloat16

    def exchange(self, out: Tensor) -> Phases:
        """Run an alltoall, sum this rank's shard, run an allgather."""
        if length := self.shape.length:
            sums = yield from self._sum_shards()
            out[:length].copy_(sums[:length])


def sum_rows(rows: Tensor, total: Tensor) -> None:
    """Write the sum of the rows of all ranks to `total`, in fp32 and on a CPU in rank order."""
    if base.processes_at_once(rows.device):
        torch.sum(rows, 0, dtype=torch.float32, out=total)
    else:
        total.copy_(rows[0])
        for row in rows[1:]:
            total.add_(row)


def pieces(length: int, like: Tensor) -> Iterator[slice]:
    """Yield slices that cover `length` elements and stay in a core's cache from one operation to the next.

    One slice on a GPU, where launches cost more than a cache saves.
    """
    step = max(length, 1) if base.processes_at_once(like.device) else _PIECE
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))
