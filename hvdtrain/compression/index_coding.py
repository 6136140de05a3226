"""Encode ascending indices of a bucket in the format of `sizes.topk_plan`, and decode them; never waits for a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from hvdtrain.compression.sizes import INT16_REACH


def encode(coding: str, indices: Tensor, coded: Tensor, length: int) -> None:
    """Write int64 `indices` below `length` to `coded`, (bytes,) of uint8."""
    if coding == "int32":
        coded.view(torch.int32).copy_(indices)
    elif coding == "int16":
        counts, offsets = _int16(coded, length)
        edges = torch.arange(len(counts) + 1, device=indices.device) * INT16_REACH
        counts.copy_(torch.searchsorted(indices, edges).diff())
        offsets.copy_(indices)  # the low 16 bits
    else:
        # Bit p of byte j stands for index p * bytes + j, so that whole rows are shifted and joined, not single bits.
        flags = torch.zeros(8 * len(coded), dtype=torch.uint8, device=indices.device)
        flags.index_fill_(0, indices, 1)
        coded.zero_()
        for bit, row in enumerate(flags.view(8, -1)):
            coded.bitwise_or_(row << bit)


def decode(coding: str, coded: Tensor, count: int, length: int) -> Tensor:
    """Return the `count` int64 indices that `encode` has written."""
    if coding == "int32":
        return coded.view(torch.int32).long()
    if coding == "int16":
        counts, offsets = _int16(coded, length)
        blocks = torch.arange(len(counts), device=coded.device) * INT16_REACH
        return blocks.repeat_interleave(counts.long(), output_size=count).add_(offsets.long() & (INT16_REACH - 1))
    bits = torch.arange(8, dtype=torch.uint8, device=coded.device)
    flags = ((coded >> bits[:, None]) & 1).view(-1)
    return torch.from_numpy(flags.numpy().nonzero()[0]) if coded.device.type == "cpu" else _nonzero(flags, count)


def _nonzero(flags: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` ones: the n-th is where the running sum reaches n.

    `torch.nonzero` would wait for the GPU to count them.
    """
    wanted = torch.arange(1, count + 1, dtype=torch.int32, device=flags.device)
    return torch.searchsorted(flags.cumsum(0, dtype=torch.int32), wanted)


def _int16(coded: Tensor, length: int) -> tuple[Tensor, Tensor]:
    split = 4 * -(-length // INT16_REACH)
    return coded[:split].view(torch.int32), coded[split:].view(torch.int16)
