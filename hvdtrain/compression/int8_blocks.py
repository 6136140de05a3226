"""The format of int8: codes of 8 bits, with an fp32 scale for each block of 256.

For a block x::

    s = max |x| / 127,   q = round(x / s),   decoded: s q
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hvdtrain.compression import base
from hvdtrain.compression.sizes import BLOCK, int8_row

LEVELS = 127.0
ROWS = 512
"""Blocks processed at a time on a CPU: 512 KiB of fp32, and as much scratch. Twice as many do not fit in an L2 cache;
half as many spend a third more time in calls."""
_LEAST = 1e-30
"""A block of values below this times 127 is sent as zeros, because its scale would have no inverse."""


class Codes(NamedTuple):
    """Views of one encoded shard, in runs of blocks: (rows, 256) codes, (rows, 1) scales.

    On a GPU one run of all shards: (shards, blocks, 256) codes, (shards, blocks, 1) scales.
    """

    codes: tuple[Tensor, ...]
    scales: tuple[Tensor, ...]


class Int8Blocks:
    """Encodes, sums and decodes blocks, with scratch memory for one run of them.

    On a GPU all shards are processed at once, so that the number of kernels does not depend on the number of ranks.

    Args:
        device: of the values.
        step: blocks in a run on a CPU.
        levels: the largest code.
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
