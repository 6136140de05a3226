"""Divide the parameters of a bucket among ranks, by whole tensors and by rows of the others. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from hvdtrain.compression.sizes import padded

_CHUNK = 1 << 16
"""Elements of a chunk: norms of more fp32 elements are less exact, and of fewer take longer."""
_MOST_CHUNKS = 128
"""Largest number of chunks of a tensor, so that their number does not grow with the model."""
_MANY_RANKS, _FINER = 64, 16
"""With 64 ranks or more, tensors are divided within chunks, too: a bucket into 16 parts a rank. Then the last bits of a
norm depend on the number of ranks."""


def chunk_rows(shape: Sequence[int]) -> int:
    """Return the rows (of dimension 0) of a chunk: tensors are divided, and their norms added up, by chunks.

    It is a power of two, so that common shapes are divided evenly.
    """
    if not shape:
        return 1
    elements = max(_CHUNK, math.prod(shape) // _MOST_CHUNKS)
    return 1 << max(1, elements // max(1, math.prod(shape[1:]))).bit_length() - 1


def _assign_whole(
    sizes: Sequence[int], ranks: int, whole: Sequence[bool], first: int
) -> tuple[dict[int, int], list[int]]:
    """Return the rank of each whole tensor, largest first to the rank with least, and the room left on each rank."""
    load = [0] * ranks
    order = [(first + number) % ranks for number in range(ranks)]
    owner = {}
    for index in sorted((i for i, size in enumerate(sizes) if whole[i] and size), key=lambda i: -sizes[i]):
        owner[index] = rank = min(order, key=load.__getitem__)
        load[rank] += sizes[index]
    return owner, [max(0, sum(sizes) - ranks * taken) for taken in load]


@dataclass(frozen=True)
class Rows:
    """Consecutive rows (of dimension 0) of a parameter, which one rank owns."""

    index: int  # of the parameter in its bucket
    begin: int  # first row
    end: int  # last row + 1
    rank: int  # the owner
    start: int  # first element in the flat bucket


def divide(
    shapes: Sequence[Sequence[int]], ranks: int, item_bytes: int, whole: Sequence[bool], first: int = 0
) -> tuple[list[Rows], int]:
    """Divide parameters into segments of about equal size, one for each rank: whole ones, then rows in their order.

    Args:
        shapes: of the parameters.
        ranks: number of segments.
        item_bytes: size of an element.
        whole: for each parameter, whether one rank must own all of it; others are divided between chunks, or rows.
        first: rank to prefer among equal ones for whole parameters: another one for each bucket.

    Returns: the rows in the order of their places, and the elements of a segment with its padding, equal for all ranks.
    """
    sizes = [math.prod(shape) for shape in shapes]
    owner, room = _assign_whole(sizes, ranks, whole, first)
    ends, rest = list(accumulate(room)), sum(size for size, is_whole in zip(sizes, whole, strict=True) if not is_whole)
    found: list[tuple[int, int, int, int]] = []  # index, begin, end, rank
    before = 0
    for index, (shape, size) in enumerate(zip(shapes, sizes, strict=True)):
        rows = shape[0] if shape else 1
        if index in owner:
            found.append((index, 0, rows, owner[index]))
            continue
        step = chunk_rows(shape)
        if ranks >= _MANY_RANKS and size:
            step = min(step, max(1, sum(sizes) // (_FINER * ranks) // (size // rows)))
        begin, row = 0, size // rows if rows else 0
        while begin < rows and size:  # steps with their middle before the end of a rank's room are its own
            middle = before + (begin + min(begin + step, rows)) * row // 2
            rank = min(ranks - 1, bisect_right(ends, middle * ends[-1] // rest))
            after = -(-ends[rank] * rest // ends[-1]) - before  # the least middle of a step of a later rank
            end = min(rows, max(begin + step, -(-(-(-2 * after // (step * row)) - 1) // 2) * step))
            if rank == ranks - 1 or (end + step > rows and (end + rows) * row // 2 < after):  # the last step is shorter
                end = rows
            found.append((index, begin, end, rank))
            begin = end
        before += size
    used = [0] * ranks
    starts = []
    for index, begin, end, rank in found:
        starts.append(used[rank])
        shape = shapes[index]
        used[rank] += padded((end - begin) * math.prod(shape[1:]), item_bytes)
    segment = max(used)
    return [Rows(*rows, rows[3] * segment + start) for rows, start in zip(found, starts, strict=True)], segment
