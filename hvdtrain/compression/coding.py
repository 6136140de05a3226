"""The contract of a coding, and the codings: values as fewer bytes, for collectives that move bytes and do not sum.

An engine that divides parameters sums at owners of shards: each rank encodes the shards, an alltoall sends them to
their owners, and each owner sums its own in fp32. It spreads parameters by an allgather of encoded shards. Nothing is
kept between calls, so there is no error feedback: residuals would be as large as the model on each rank.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from hvdtrain.compression.cast import pieces, sum_rows
from hvdtrain.compression.int8 import Codes, Int8Blocks
from hvdtrain.compression.sizes import BLOCK, int8_row

_EXPONENT = 0x7F800000  # the bits of an fp32 number that make the power of two below it
_TO_FP16 = 2.0**-14
"""Divided by a power of two below it times this, a number is from 2^14 to 2^15: fp16's largest is just below 2^16."""
_NORMAL = 2.0**-126  # the smallest fp32 number with an inverse


class Coding(Protocol):
    """Encodes shards of equal length. Decoded values have equal bits on all ranks.

    A shard with a value that is not finite has one after decoding, too.
    """

    def encode(self, shards: Tensor) -> Tensor:
        """Return (shards, length) of fp32 encoded: flat, with as many elements for each shard."""

    def sum(self, received: Tensor, out: Tensor) -> None:
        """Write the sum of the encoded shards in `received`, of all ranks in their order, to `out`: (length,), fp32."""

    def decode(self, received: Tensor, out: Tensor) -> None:
        """Write the encoded shards in `received` to `out`, (shards, length) of any floating dtype."""


class Bf16Coding(Coding):
    """Rounds to bfloat16."""

    def __init__(self, device: torch.device) -> None:
        return

    def encode(self, shards: Tensor) -> Tensor:  # noqa: D102
        return shards.to(torch.bfloat16).view(-1)

    def sum(self, received: Tensor, out: Tensor) -> None:  # noqa: D102
        rows = received.view(-1, len(out))
        for piece in pieces(len(out), rows):
            sum_rows(rows[:, piece], out[piece])

    def decode(self, received: Tensor, out: Tensor) -> None:  # noqa: D102
        out.copy_(received.view(out.shape))


class Fp16Coding(Coding):
    """Rounds to fp16, divided by a power of two for each shard, which brings its largest value near fp16's.

    A row of fp16: the values, a zero if their number is odd, and the fp32 power.
    """

    def __init__(self, device: torch.device) -> None:
        return

    def encode(self, shards: Tensor) -> Tensor:  # noqa: D102
        count, length = shards.shape
        largest = torch.maximum(shards.amax(1), -shards.amin(1))
        powers = (largest.view(torch.int32) & _EXPONENT).view(torch.float32).mul_(_TO_FP16).clamp_(min=_NORMAL)
        rows = torch.zeros(count, _fp16_row(length), dtype=torch.float16, device=shards.device)
        rows[:, -2:].view(torch.float32)[:, 0] = powers
        for piece in pieces(length, rows):
            rows[:, piece] = shards[:, piece] / powers.unsqueeze(1)
        return rows.view(-1)

    def sum(self, received: Tensor, out: Tensor) -> None:  # noqa: D102
        rows = received.view(-1, _fp16_row(len(out)))
        for piece in pieces(len(out), rows):
            sum_rows(rows[:, piece].float().mul_(rows[:, -2:].view(torch.float32)), out[piece])

    def decode(self, received: Tensor, out: Tensor) -> None:  # noqa: D102
        rows = received.view(len(out), -1)
        out.copy_(rows[:, : out.shape[1]]).mul_(rows[:, -2:].view(torch.float32))


def _fp16_row(length: int) -> int:
    return length + length % 2 + 2


class Int8Coding(Coding):
    """Codes of 8 bits in blocks of 256 with a scale; the last block of a shard is padded with zeros."""

    def __init__(self, device: torch.device) -> None:
        self._blocks = Int8Blocks(device)
        self._last = torch.zeros(1, BLOCK, device=device)

    def encode(self, shards: Tensor) -> Tensor:  # noqa: D102
        count, length = shards.shape
        padded, row_bytes = int8_row(length, 1)
        sent = torch.empty(count * row_bytes, dtype=torch.uint8, device=shards.device)
        views = self._blocks.views(sent, padded)
        if self._blocks.at_once:
            blocks = torch.nn.functional.pad(shards, (0, padded - length)).view(count, -1, BLOCK)
            self._blocks.encode(blocks, views[0].codes[0], views[0].scales[0])
            return sent
        for shard, encoded in zip(shards, views, strict=True):
            self._encode_runs(shard, encoded)
        return sent

    def _encode_runs(self, shard: Tensor, encoded: Codes) -> None:
        start = 0
        for codes, scales in zip(*encoded, strict=True):
            whole = min(len(codes), (len(shard) - start) // BLOCK)
            if whole:
                values = shard[start : start + whole * BLOCK].view(-1, BLOCK)
                self._blocks.encode(values, codes[:whole], scales[:whole])
                start += whole * BLOCK
            if whole < len(codes):
                self._last.zero_()[0, : len(shard) - start] = shard[start:]
                self._blocks.encode(self._last, codes[whole:], scales[whole:])

    def sum(self, received: Tensor, out: Tensor) -> None:  # noqa: D102
        views = self._blocks.views(received, int8_row(len(out), 1)[0])
        start = 0
        for number in range(len(views[0].codes)):
            total = self._blocks.sum(views, number).view(-1)
            place = out[start : start + len(total)]
            place.copy_(total[: len(place)])
            start += len(total)

    def decode(self, received: Tensor, out: Tensor) -> None:  # noqa: D102
        padded = int8_row(out.shape[1], 1)[0]
        views = self._blocks.views(received, padded)
        if not self._blocks.at_once:
            for encoded, row in zip(views, out, strict=True):
                self._blocks.decode([encoded], row)
        elif padded == out.shape[1]:
            self._blocks.decode(views, out.view(-1))
        else:
            values = views[0].codes[0] * views[0].scales[0]
            out.copy_(values.view(len(out), padded)[:, : out.shape[1]])
