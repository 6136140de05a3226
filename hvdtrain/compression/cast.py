"""Gradients cast to half as many bits for the way (Micikevicius et al., "Mixed Precision Training", 2018)."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping

import torch
from torch import Tensor

from hvdtrain.comm.base import Comm, Handle
from hvdtrain.compression.base import BucketShape, Compressor, Phases
from hvdtrain.compression.chunks import pieces
from hvdtrain.compression.owners import Owners
from hvdtrain.errors import JoinedError

_BACK_OFF = 4
"""Powers of two that a sum which is not finite takes from the scale."""
_LARGEST = 8
"""The largest magnitude of a sum is brought to just below two to that: parts and later steps may be 2^8 times as large,
and what is 2^-22 of it is still a normal fp16 number."""
_LOOKS = 16
"""Steps between two looks for it."""
_NOTHING = 10
"""The exponent with which a sum of zeros is looked at again: gradients up to 64 still fit when they come back."""
_RANGE = (-40, 24)
"""Of the scale's exponent."""


def fp16(shape: BucketShape, comm: Comm, *, keep_error: bool = False) -> Compressor:
    """The compressor of fp16; bfloat16 gradients, whose range it lacks, travel as they are."""
    return (Bf16 if shape.dtype == torch.bfloat16 else Fp16)(shape, comm, keep_error=keep_error)


def fp16_by_owners(shape: BucketShape, comm: Comm, *, keep_error: bool = False) -> Compressor:
    """The same where a sum of halves is slow."""
    return (Bf16 if shape.dtype == torch.bfloat16 else Fp16ByOwners)(shape, comm, keep_error=keep_error)


class Fp16(Compressor):
    """One allreduce of ``h = fp16(s g)``; ``out = sum(h) / s``.

    ``s = 2^e``, so that scaling rounds nothing that is not below fp16's normal range. At first e is -ceil(log2 size): a
    sum stays in range where its parts do. Then it follows the largest magnitude of the sums, which is looked for every
    16 steps and after each sum that was not finite; such a sum, which all ranks see, takes 4 from e.

    Passes over the bucket, in bytes of fp32: 1/2 to pack (written; the gradient is hot), 1 1/2 to unpack (its check for
    overflow reads what is in cache).

    Attributes:
        scale: s, what gradients are multiplied with on their way.
    """

    def __init__(self, shape: BucketShape, comm: Comm, *, keep_error: bool = False) -> None:
        super().__init__(shape, comm, keep_error=keep_error)
        self._wire = shape.zeros(len(self.work), torch.float16) if keep_error else self.work
        count = len(list(pieces(shape.length, self.work)))
        self._sums = shape.zeros(count, torch.float32)  # of finite halves, a sum in halves may be infinite
        self._lows, self._highs = shape.zeros(count), shape.zeros(count)
        self._first = -(comm.size - 1).bit_length()
        self._set(self._first, 0)

    def _set(self, exponent: int, steps: int) -> None:
        """Take an exponent, and how many steps ago the largest magnitude was looked for."""
        low, high = _RANGE
        self._exponent, self._steps = max(low, min(high, exponent)), steps
        self.scale = math.ldexp(1.0, self._exponent)

    def make_work(self) -> Tensor:
        """What is sent, or where errors are kept, what it is made of."""
        return self.shape.zeros(dtype=torch.float32 if self.keeps_error else torch.float16)

    def pack(self, index: int, gradient: Tensor | None, weight: float = 1.0) -> None:
        """Cast to the place, scaled."""
        super().pack(index, gradient, weight if self.keeps_error else weight * self.scale)

    def exchange(self, out: Tensor) -> Phases:
        """Scale where that was not done in packing, sum, scale back."""
        scale = self.scale
        if self.keeps_error:
            for piece in pieces(self.shape.length, self.work):
                torch.mul(self.work[piece], scale, out=self._wire[piece])
                self.work[piece].sub_(self._wire[piece], alpha=1 / scale)
        came = yield from self._summed()
        for number, piece in enumerate(pieces(self.shape.length, out)):
            # Not torch.mul(out=): the product would be rounded to fp16 on its way.
            summed = out[piece].copy_(came[piece]).mul_(1 / scale)
            if self._steps == 0:
                torch.aminmax(summed, out=(self._lows[number], self._highs[number]))
            torch.sum(summed, 0, dtype=torch.float32, out=self._sums[number])

    def _summed(self) -> Generator[Handle, Tensor, Tensor]:
        yield self.comm.allreduce(self._wire, name=self.shape.name)
        return self._wire

    def finite(self) -> bool:
        """Whether the sum of all that came is: a read of a number for each piece."""
        return bool(torch.isfinite(self._sums).all())

    def commit(self, *, applied: bool) -> None:
        """Let the scale follow what came: a sum that is not finite, whether or not the step was skipped for it."""
        if not self.finite():
            self._set(self._exponent - _BACK_OFF, 0)
        elif applied:
            looked = self._steps == 0 and self.shape.length > 0
            largest = float(torch.maximum(-self._lows, self._highs).max()) if looked else None
            if largest:
                self._set(_LARGEST - math.frexp(largest)[1], 1)
            elif looked and self._exponent < _NOTHING:
                # Too small for the first scale, or for the one that inf or nan have left.
                self._set(_NOTHING, 0)
            else:
                self._set(self._exponent, (self._steps + 1) % _LOOKS)

    def state_dict(self) -> dict[str, Tensor]:
        """The scale: its exponent, and how many steps ago the largest magnitude was looked for."""
        state = torch.tensor([self._exponent, self._steps])
        return {f"{part.name}/fp16_scale": state.clone() for part in self.shape.parts}

    def load_state_dict(self, state: Mapping[str, Tensor], ranks: int) -> None:
        """Take the smallest scale of those that the bucket's parameters had."""
        found = [state[key] for part in self.shape.parts if (key := f"{part.name}/fp16_scale") in state]
        exponent, steps = min(tensor.tolist() for tensor in found) if found else (self._first, 0)
        self._set(exponent, steps)

    def buffers(self) -> list[Tensor]:
        """The memory it takes."""
        return [self.work, self._wire] if self.keeps_error else [self.work]


class Fp16ByOwners(Fp16):
    """The same halves, summed in fp32 by owners: for Gloo on CPUs, which sums halves in software, one by one.

    Passes over the bucket beside those of `Fp16`, in bytes of fp32: 1 to sum.
    """

    def __init__(self, shape: BucketShape, comm: Comm, *, keep_error: bool = False) -> None:
        self._owners = Owners(shape, comm, torch.float16)
        super().__init__(shape, comm, keep_error=keep_error)

    def make_work(self) -> Tensor:
        """What is sent, or where errors are kept, what it is made of; padded to equal shares."""
        return self.shape.zeros(self._owners.padded, torch.float32 if self.keeps_error else torch.float16)

    def _summed(self) -> Generator[Handle, Tensor, Tensor]:
        if not self.shape.length:
            return self._wire
        left = self.work if self.keeps_error else None
        try:
            return (yield from self._owners.summed(self._wire, left, 1 / self.scale))
        except JoinedError:  # a rank that has joined owns nothing
            return (yield from super()._summed())

    def buffers(self) -> list[Tensor]:
        """The memory it takes."""
        return [*super().buffers(), *self._owners.buffers()]


class Bf16(Compressor):
    """Summed in fp32 by owners: an alltoall of shares as bfloat16, then an allgather of the rounded sums.

    ``out = bf16(sum over ranks of fp32(bf16(g)))``, in rank order. Twice the rounding of one cast, at any size.

    Passes over the bucket, in bytes of fp32: 1/2 to pack, 1 to sum, 1 1/2 to unpack.
    """

    def __init__(self, shape: BucketShape, comm: Comm, *, keep_error: bool = False) -> None:
        self._owners = Owners(shape, comm, torch.bfloat16)
        super().__init__(shape, comm, keep_error=keep_error)
        self._wire = shape.zeros(len(self.work), torch.bfloat16) if keep_error else self.work
        self._came = self._wire

    def make_work(self) -> Tensor:
        """What is sent, or where errors are kept, what it is made of; padded to equal shares."""
        return self.shape.zeros(self._owners.padded, torch.float32 if self.keeps_error else torch.bfloat16)

    def exchange(self, out: Tensor) -> Phases:
        """An alltoall, the sum of a share, an allgather."""
        length = self.shape.length
        if not length:
            return
        if self.keeps_error:
            for piece in pieces(len(self.work), self.work):
                self._wire[piece].copy_(self.work[piece])
                self.work[piece].sub_(self._wire[piece])
        self._came = yield from self._owners.summed(self._wire, self.work if self.keeps_error else None)
        out[:length].copy_(self._came[:length])

    def finite(self) -> bool:
        """Whether the sums are: read over again, so looked at only where an error is kept."""
        return not self.keeps_error or bool(torch.isfinite(self._came.sum(dtype=torch.float32)))

    def buffers(self) -> list[Tensor]:
        """The memory it takes."""
        return [self.work, *self._owners.buffers(), *([self._wire] if self.keeps_error else [])]
