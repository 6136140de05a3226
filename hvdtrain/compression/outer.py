"""Codings of the outer exchange: the change of a worker's parameters as a constant number of bytes.

They are not those of gradients (`table`): all workers get the payload of each, so that there is one encoding, no sum at
owners, and any size of code. Error feedback is the caller's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from hvdtrain.compression import base
from hvdtrain.compression.sizes import OUTER_BLOCKS, OUTER_CHUNK, outer_count, outer_payload

_AT_ONCE = 1 << 17  # values that a CPU encodes at a time, so that scratch memory stays in its cache
_SMALLEST = 1e-30
_SPLIT = 1.23
"""Over the mean magnitude, where large ones begin: 0.9816 of the standard deviation of normal values, which is best
(Max, "Quantizing for Minimum Distortion", 1960)."""
_POSITION_BITS = 12


class OuterCoding(ABC):
    """Encodes flat fp32 values; payloads decode to equal bits on all ranks.

    If a value is not finite, neither is a decoded one. Nothing waits for a GPU. `name`, `number`: of its `OuterKind`.
    """

    def __init__(self, name: str, number: float) -> None:
        self._name, self._number = name, number

    def payload_bytes(self, length: int) -> int:
        """Return the bytes of `length` encoded values."""
        return outer_payload(self._name, self._number, length)

    @abstractmethod
    def encode(self, values: Tensor, out: Tensor) -> None:
        """Encode `values`, (n,) of fp32, into `out`, (payload_bytes(n),) of uint8."""

    @abstractmethod
    def add(self, payload: Tensor, total: Tensor, weight: float = 1.0) -> None:
        """Add the decoded values, times `weight`, to `total`, (n,) of fp32."""


class Bf16(OuterCoding):
    """Rounds to bfloat16."""

    def encode(self, values: Tensor, out: Tensor) -> None:
        """Round."""
        out.view(torch.bfloat16).copy_(values)

    def add(self, payload: Tensor, total: Tensor, weight: float = 1.0) -> None:
        """Widen and add."""
        total.add_(payload.view(torch.bfloat16), alpha=weight)


class Blocks(OuterCoding):
    """Codes of 8, 4 or 2 bits in blocks.

    8 and 4 bits are uniform; the largest magnitude is the scale. 2 bits are a sign and one of two magnitudes
    (`two_levels`): where a block has many zeros, such as unused rows of an embedding, the small one is near zero.
    """

    def __init__(self, name: str, number: float) -> None:
        super().__init__(name, number)
        self._bits, self._block, self._scales = OUTER_BLOCKS[name]
        self._top = (1 << (self._bits - 1)) - 1

    def encode(self, values: Tensor, out: Tensor) -> None:  # noqa: D102
        codes, scales = self._views(out)
        for rows, blocks in _rows(values, self._block):
            if self._bits == 2:
                rest = (len(values) - 1) % self._block + 1 if rows.stop == len(scales) else self._block
                magnitudes = blocks.abs()
                mean = magnitudes.mean(1, keepdim=True)
                mean[-1] *= self._block / rest
                is_large = magnitudes > _SPLIT * mean
                scales[rows] = two_levels(magnitudes, is_large, self._block, rest)
                codes[rows] = _pack(is_large.to(torch.uint8) + 2 * (blocks < 0), 2)
                continue
            high = blocks.abs().amax(1, keepdim=True).div_(self._top)
            scales[rows] = high
            scaled = blocks * torch.where(high > _SMALLEST, 1 / high, 0.0)
            codes[rows] = _pack(scaled.round_().add_(self._top).to(torch.uint8), self._bits)

    def add(self, payload: Tensor, total: Tensor, weight: float = 1.0) -> None:  # noqa: D102
        codes, scales = self._views(payload)
        for rows, place in _places(len(total), self._block, total.device):
            found = _unpack(codes[rows], self._bits)
            if self._bits == 2:
                decoded = _signed(found, scales[rows])
            else:
                decoded = found.float().sub_(self._top).mul_(scales[rows])
            part = total[place]
            part.add_(decoded.view(-1)[: len(part)], alpha=weight)

    def _views(self, payload: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes, (blocks, bytes), and scales, (blocks, 1 or 2)."""
        width = self._block * self._bits // 8
        blocks = len(payload) // (width + 4 * self._scales)
        codes, scales = torch.tensor_split(payload, [blocks * width])
        return codes.view(blocks, width), scales.view(torch.float32).view(blocks, self._scales)


def two_levels(magnitudes: Tensor, is_large: Tensor, width: int, rest: int) -> Tensor:
    """Return the means of the small and of the large magnitudes of each row, (rows, 2).

    The means are the best levels for any distribution (Lloyd, "Least squares quantization in PCM", 1982). Of the last
    row, only `rest` of `width` magnitudes count; the others are zero.
    """
    large = is_large.sum(1)
    small = width - large
    small[-1] -= width - rest
    sums = torch.where(is_large, magnitudes, 0.0).sum(1)
    return torch.stack([(magnitudes.sum(1) - sums) / small.clamp(min=1), sums / large.clamp(min=1)], 1)


def _signed(codes: Tensor, levels: Tensor) -> Tensor:
    """Return the values of codes of a sign and one of two levels."""
    return levels.gather(1, (codes & 1).long()) * (1.0 - (codes & 2).float())


class ChunkedTopK(OuterCoding):
    """The largest values of each chunk of 4096, with a sign and one of two magnitudes.

    SparseLoCo (arXiv 2508.15706) chooses by chunks, and has 12 bits for a position and 2 for a value. The magnitudes
    are the means of the chosen values below and above their mean.
    """

    def __init__(self, name: str, number: float) -> None:
        super().__init__(name, number)
        self._count = outer_count(number)

    def encode(self, values: Tensor, out: Tensor) -> None:  # noqa: D102
        if not len(values):
            return
        positions, codes, magnitudes = self._views(out)
        for rows, chunks in _rows(values, OUTER_CHUNK):
            found, index = chunks.abs().topk(self._count, dim=1, sorted=False)
            is_large = found >= found.mean(1, keepdim=True)
            magnitudes[rows] = two_levels(found, is_large, self._count, self._count)
            is_negative = chunks.gather(1, index) < 0
            codes[rows] = _pack(is_large.to(torch.uint8) + 2 * is_negative, 2)
            positions[rows] = _pack_positions(index)

    def add(self, payload: Tensor, total: Tensor, weight: float = 1.0) -> None:  # noqa: D102
        if not len(total):
            return
        positions, codes, magnitudes = self._views(payload)
        for rows, place in _places(len(total), OUTER_CHUNK, total.device):
            values = _signed(_unpack(codes[rows], 2)[:, : self._count], magnitudes[rows])
            chunks = torch.zeros(len(values), OUTER_CHUNK, device=total.device)
            chunks.scatter_(1, _unpack_positions(positions[rows])[:, : self._count], values)
            part = total[place]
            part.add_(chunks.view(-1)[: len(part)], alpha=weight)

    def _views(self, payload: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return positions and codes, (chunks, bytes), and magnitudes, (chunks, 2)."""
        widths = (8, -(-self._count // 2) * 3, -(-self._count // 4))
        chunks = len(payload) // sum(widths)
        sizes = [chunks * width for width in widths]  # fp32 first, which must be aligned; the end is padding
        magnitudes, positions, codes, _ = torch.split(payload, [*sizes, len(payload) - sum(sizes)])
        return positions.view(chunks, -1), codes.view(chunks, -1), magnitudes.view(torch.float32).view(chunks, 2)


def _rows(values: Tensor, width: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield some rows of `width` values at a time; the last one is padded with zeros."""
    for rows, place in _places(len(values), width, values.device):
        part = values[place]
        yield rows, torch.nn.functional.pad(part, (0, -len(part) % width)).view(-1, width)


def _places(length: int, width: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Yield slices of rows of `width` values, and those of the values in them."""
    rows = -(-length // width)
    step = max(rows, 1) if base.processes_at_once(device) else max(1, _AT_ONCE // width)
    for first in range(0, rows, step):
        last = min(first + step, rows)
        yield slice(first, last), slice(first * width, min(last * width, length))


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Return (n, m) codes of some bits as (n, bytes)."""
    each = 8 // bits
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % each))
    parts = padded.view(len(codes), -1, each)
    found = parts[..., 0].clone()
    for number in range(1, each):
        found |= parts[..., number] << (bits * number)
    return found


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """Return (n, m) codes, of whole bytes."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(2) >> shifts) & ((1 << bits) - 1)).flatten(1)


def _pack_positions(index: Tensor) -> Tensor:
    """Return (n, k) numbers of 12 bits as (n, bytes), two in three bytes."""
    pairs = torch.nn.functional.pad(index, (0, index.shape[1] % 2)).view(len(index), -1, 2)
    joined = pairs[..., 0] | pairs[..., 1] << _POSITION_BITS
    shifts = torch.arange(0, 24, 8, device=index.device)
    return ((joined.unsqueeze(2) >> shifts) & 255).to(torch.uint8).flatten(1)


def _unpack_positions(packed: Tensor) -> Tensor:
    """Return (n, k) int64 numbers, and one more if k is odd."""
    parts = packed.view(len(packed), -1, 3).long()
    joined = parts[..., 0] | parts[..., 1] << 8 | parts[..., 2] << 16
    shifts = torch.tensor([0, _POSITION_BITS], device=packed.device)
    return ((joined.unsqueeze(2) >> shifts) & (OUTER_CHUNK - 1)).flatten(1)
