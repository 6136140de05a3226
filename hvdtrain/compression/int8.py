"""Gradients as 8-bit integers with a scale for each block of 256.

Alistarh et al., "QSGD", 2017 (stochastic rounding); Dettmers, "8-Bit Approximations for Parallelism in Deep Learning",
2015; Wang et al., "ZeRO++", 2023 (blocks, and an alltoall so that errors do not add up hop by hop). For a block x::

    s = max |x| / 127,   q = round(x / s),   decoded: s q
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hvdtrain.comm.base import Comm
from hvdtrain.compression import base
from hvdtrain.compression.base import BucketShape, Compressor, Phases
from hvdtrain.compression.sizes import BLOCK, int8_row

LEVELS = 127.0
ROWS = 512
"""Blocks processed at a time on a CPU: 512 KiB of fp32, and as much scratch. Twice as many do not fit in an L2 cache;
half as many spend a third more time in calls."""
_LEAST = 1e-30  # a block of values below this times 127 is sent as zeros, because its scale would have no inverse


class Codes(NamedTuple):
    """Views of one encoded shard, in runs of blocks: (rows, 256) codes, (rows, 1) scales.

    On a GPU one run of all shards: (shards, blocks, 256) codes, (shards, blocks, 1) scales.
    """

    codes: tuple[Tensor, ...]
    scales: tuple[Tensor, ...]


class Int8Blocks:
    """Encodes, sums and decodes blocks, with scratch memory for one run of them.

    On a GPU all shards are processed at once, so that the number of kernels does not depend on the number of ranks.

    `step`: blocks in a run on a CPU. `levels`: the largest code.
    """

    def __init__(self, device: torch.device, step: int = ROWS, levels: float = LEVELS) -> None:
        self.at_once = base.processes_at_once(device)
        self._levels = levels
        self._step = step
        scratch = 0 if self.at_once else step
        self._scaled, self._total = (torch.zeros(scratch, BLOCK, device=device) for _ in range(2))
        self._high = torch.zeros(scratch, 1, device=device)

    def runs(self, blocks: Tensor) -> tuple[Tensor, ...]:
        """Return the runs of a shard's (blocks, ...); on a GPU one run of (shards, blocks, ...)."""
        return (blocks,) if self.at_once else torch.split(blocks, self._step)

    def views(self, flat: Tensor, shard: int) -> list[Codes]:
        """Return the views of each encoded shard, of `shard` elements, in `flat`."""
        rows = flat.view(-1, int8_row(shard, 1)[1])
        codes = rows[:, :shard].view(torch.int8).view(len(rows), -1, BLOCK)
        scales = rows[:, shard:].view(torch.float32).unsqueeze(2)
        if self.at_once:
            return [Codes((codes,), (scales,))]
        return [Codes(self.runs(c), self.runs(s)) for c, s in zip(codes, scales, strict=True)]

    def encode(
        self, x: Tensor, codes: Tensor, scales: Tensor, noise: Tensor | None = None, *, keep_error: bool = False
    ) -> None:
        """Encode a run of (..., rows, 256) values; leave the error in `x` if it is kept.

        With `noise`, random numbers from 0 to 1, it rounds up or down at random.
        """
        if self.at_once:
            high, scaled = torch.empty(scales.shape, device=x.device), torch.empty_like(x)
        else:
            high, scaled = self._high[: len(x)], self._scaled[: len(x)]
            noise = None if noise is None else noise[: len(x)]
        torch.amax(x, -1, keepdim=True, out=scales)
        torch.neg(torch.amin(x, -1, keepdim=True, out=high), out=high)
        torch.maximum(scales, high, out=scales).clamp_(min=_LEAST * self._levels).div_(self._levels)
        torch.mul(x, torch.reciprocal(scales, out=high), out=scaled)
        if noise is None:
            scaled.round_()
        else:
            scaled.add_(noise).floor_()
        codes.copy_(scaled)
        if keep_error:
            x.addcmul_(scaled, scales, value=-1)

    def sum(self, received: list[Codes], number: int) -> Tensor:
        """Return the sum of run `number` of the shards of all ranks, in rank order; valid until the next call."""
        first = received[0]
        if self.at_once:
            return torch.mul(first.codes[0], first.scales[0]).sum(0, keepdim=True)
        length = len(first.codes[number])
        total, part = self._total[:length], self._scaled[:length]
        torch.mul(first.codes[number], first.scales[number], out=total)
        for other in received[1:]:
            total.addcmul_(part.copy_(other.codes[number]), other.scales[number])
        return total

    def decode(self, received: list[Codes], out: Tensor) -> None:
        """Write all shards to `out`, which ends before the padding."""
        start, length = 0, len(out)
        for row in received:
            for codes, scales in zip(*row, strict=True):
                place = out[start : min(start + codes.numel(), length)]
                if len(place) == codes.numel():
                    place.view(codes.shape).copy_(codes).mul_(scales)  # faster than one torch.mul from int8
                else:
                    values = (
                        codes * scales if self.at_once else torch.mul(codes, scales, out=self._scaled[: len(codes)])
                    )
                    place.copy_(values.view(-1)[: len(place)])
                start += codes.numel()

    def scratch(self) -> list[Tensor]:
        """Return the scratch memory."""
        return [self._scaled, self._total]


def stochastic(shape: BucketShape, comm: Comm) -> Int8:
    """Make the compressor with stochastic rounding, which is unbiased."""
    return Int8(shape, comm, stochastic=True)


class Int8(Compressor):
    """An alltoall of encoded shards; each owner sums its shard in fp32 in rank order, encodes it and sends it to all.

    Decoding is one exact multiplication of bytes that are equal on all ranks, so `out` has equal bits on any CPUs.

    On a GPU all shards are processed at once, so that the number of kernels does not depend on the number of ranks.

    Passes over the bucket, in bytes of fp32: 1 to pack, 1 1/4 to encode (2 1/4 if errors are kept), 1/2 to sum, 1 1/4
    to decode.

    `stochastic`: round up or down at random so that the mean is right. The random numbers depend on the bucket's name,
    the rank and the number of applied steps, and repeat within a step.
    """

    def __init__(self, shape: BucketShape, comm: Comm, *, keep_error: bool = False, stochastic: bool = False) -> None:
        self._shard, self._row = int8_row(shape.length, comm.size)
        super().__init__(shape, comm, keep_error=keep_error)
        blocks = self._shard // BLOCK
        step = min(ROWS, blocks)
        # With a random number below 1 added, the largest code is below 128.
        self._blocks = Int8Blocks(shape.device, step, LEVELS - 0.01 * stochastic)
        self._sent = self.add_buffer(comm.size * self._row, torch.uint8)
        self._own = self.add_buffer(self._row, torch.uint8)
        self._buffers += self._blocks.scratch()
        noise = blocks if self._blocks.at_once else step
        self._noise = self.add_buffer(noise * BLOCK).view(-1, BLOCK) if stochastic else None
        self._applied = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._sum_scales = shape.zeros(0, torch.float32)

    def make_work(self) -> Tensor:
        """Return a buffer of fp32, padded to equal shards of whole blocks."""
        return self.shape.zeros(self._shard * self.comm.size, torch.float32)

    def exchange(self, out: Tensor) -> Phases:
        """Run an alltoall, sum this rank's shard, run an allgather."""
        if not self._shard:
            return
        self._draw("shares")
        work = self.work.view(self.comm.size, -1, BLOCK)
        for row, sent in zip([work] if self._blocks.at_once else work, self._views(self._sent), strict=True):
            for x, codes, scales in zip(self._blocks.runs(row), *sent, strict=True):
                self._blocks.encode(x, codes, scales, self._noise, keep_error=self.keeps_error)
        received = yield self.comm.alltoall(self._sent, name=f"{self.shape.name}/shares")
        self._draw("sums")  # new numbers: a sum rounded with the numbers of one of its parts would be biased
        own = work[self.comm.rank : self.comm.rank + 1]
        self._sum(self._views(received), own if self._blocks.at_once else own[0])
        received = yield self.comm.allgather(self._own, name=f"{self.shape.name}/sums")
        self._sum_scales = received.view(self.comm.size, -1)[:, self._shard :].view(torch.float32)
        self._blocks.decode(self._views(received), out[: self.shape.length])

    def figures(self) -> Tensor:
        """Return the sum of the scales of the sums."""
        return self._sum_scales.sum().view(1)

    def commit(self, figures: Sequence[float], *, applied: bool) -> None:
        """Count the step; if it was not finite, clear `work`, because packing does not overwrite gaps and padding."""
        if not base.is_finite(figures):
            self.work.zero_()
        elif applied:
            self._applied += 1

    def state_dict(self) -> dict[str, Tensor]:
        """Return the number of applied steps if rounding is stochastic."""
        if self._noise is None:
            return {}
        return {f"{part.name}/int8_steps": self._applied.clone() for part in self.shape.parts}

    def load_state_dict(self, state: Mapping[str, Tensor], ranks: int) -> None:
        """Continue the sequence of random numbers."""
        found = [int(state[key]) for part in self.shape.parts if (key := f"{part.name}/int8_steps") in state]
        self._applied.fill_(max(found, default=0))

    def _views(self, flat: Tensor) -> list[Codes]:
        return self._blocks.views(flat, self._shard)

    def _draw(self, use: str) -> None:
        if self._noise is not None:
            seed = zlib.crc32(f"{self.shape.name} {use} {self.comm.rank} {int(self._applied)}".encode())
            generator = torch.Generator(self._noise.device).manual_seed(seed)
            self._noise.uniform_(generator=generator)

    def _sum(self, received: list[Codes], own_work: Tensor) -> None:
        """Sum this rank's shard and encode it; add the encoding error to this rank's own error."""
        (own,) = self._views(self._own)
        for number, (x, codes, scales) in enumerate(zip(self._blocks.runs(own_work), *own, strict=True)):
            total = self._blocks.sum(received, number)
            self._blocks.encode(total, codes, scales, self._noise, keep_error=self.keeps_error)
            if self.keeps_error:
                x.add_(total)
