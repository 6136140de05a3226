"""Divide the parameters of a bucket among ranks, by whole tensors and by rows of the others. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hvdtrain.compression.sizes import padded

_CHUNK = 1 << 16
"""Elements of a chunk: norms of more fp32 elements are less exact, and of fewer take longer."""
_MOST_CHUNKS = 128
"""Largest number of chunks of a tensor, so that their number does not grow with the model."""


def chunk_rows(shape: Sequence[int]) -> int:
    """Return the rows (of dimension 0) of a chunk: tensors are divided, and their norms added up, by chunks.

    It is a power of two, so that common shapes are divided evenly.
    """
    if not shape:
        return 1
    elements = max(_CHUNK, math.prod(shape) // _MOST_CHUNKS)
    return 1 << max(1, elements // max(1, math.prod(shape[1:]))).bit_length() - 1


@dataclass(frozen=True)
class Rows:
    """Consecutive rows (of dimension 0) of a parameter, which one rank owns.

    Attributes:
        index: of the parameter in its bucket.
        begin: first row.
        end: last row + 1.
        rank: the owner.
        start: first element in the flat bucket.
    """

    index: int
    begin: int
    end: int
    rank: int
    start: int


def divide(
    shapes: Sequence[Sequence[int]], ranks: int, item_bytes: int, whole: Sequence[bool]
) -> tuple[list[Rows], int]:
    """Divide parameters, in their order, into segments of about equal size, one for each rank.

    Args:
        shapes: of the parameters.
        ranks: number of segments.
        item_bytes: size of an element.
        whole: for each parameter, whether one rank must own all of it; others are divided between chunks.

    Returns:
        the rows in the order of their places, and the elements of a segment with its padding, equal for all ranks.
    """
    total = sum(map(math.prod, shapes))
    found: list[tuple[int, int, int, int]] = []  # index, begin, end, rank
    before = 0
    for index, shape in enumerate(shapes):
        rows, size = (shape[0] if shape else 1), math.prod(shape)
        step = max(1, rows) if whole[index] else chunk_rows(shape)
        for begin in range(0, rows if size else 0, step):
            end = min(begin + step, rows)
            middle = before + (begin + end) * (size // rows) // 2
            rank = min(ranks - 1, middle * ranks // total)
            if found and found[-1][0] == index and found[-1][3] == rank:
                begin = found.pop()[1]
            found.append((index, begin, end, rank))
        before += size
    used = [0] * ranks
    starts = []
    for index, begin, end, rank in found:
        starts.append(used[rank])
        shape = shapes[index]
        used[rank] += padded((end - begin) * math.prod(shape[1:]), item_bytes)
    segment = max(used)
    return [Rows(*rows, rows[3] * segment + start) for rows, start in zip(found, starts, strict=True)], segment
