"""Divide the parameters of a bucket among ranks: whole tensors, rows of others, and elements of long rows. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from hvdtrain.compression.sizes import padded

if TYPE_CHECKING:
    from torch import Tensor

_CHUNK = 1 << 16
"""Elements of a chunk: norms of more fp32 elements are less exact, and of fewer take longer."""
_MOST_CHUNKS = 128
"""Largest number of chunks of a tensor, so that their number does not grow with the model."""
_ALIGNED = 16
"""With many ranks, elements that a rank owns begin at multiples of this: kernels of GPUs load several at once."""
_MANY_RANKS, _FINER = 9, 32
"""With 9 ranks or more, tensors are divided within chunks, too: a bucket into 32 parts a rank. Then the last bits of a
norm depend on the number of ranks."""


def chunk(shape: Sequence[int], *, by_rows: bool = False) -> tuple[int, int]:
    """Return the elements of a row, and the rows of a chunk: tensors are divided, and their norms added up, by chunks.

    A row is one of dimension 0, or an element if such a row has more elements than a chunk, unless `by_rows`. A chunk's
    rows are a power of two, so that common shapes are divided evenly.
    """
    row = math.prod(shape[1:])
    elements = max(_CHUNK, math.prod(shape) // _MOST_CHUNKS)
    if row > elements and not by_rows:
        row = 1
    return row, 1 << max(1, elements // max(1, row)).bit_length() - 1 if shape else 1


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
    """Consecutive rows (of dimension 0) of a parameter, or consecutive elements, which one rank owns."""

    index: int  # of the parameter in its bucket
    begin: int  # first row
    end: int  # last row + 1
    rank: int  # the owner
    flat: bool  # whether rows are elements
    start: int  # first element in the flat bucket

    def of(self, tensor: Tensor) -> Tensor:
        """Return these rows of a tensor with the parameter's shape; elements have one dimension."""
        if not tensor.dim():
            return tensor
        return (tensor.reshape(-1) if self.flat else tensor)[self.begin : self.end]


def divide(
    shapes: Sequence[Sequence[int]],
    ranks: int,
    item_bytes: int,
    whole: Sequence[bool],
    first: int = 0,
    *,
    by_rows: bool = False,
) -> tuple[list[Rows], int]:
    """Divide parameters into segments of about equal size, one for each rank: whole ones, then rows in their order.

    Args:
        shapes: of the parameters.
        ranks: number of segments.
        item_bytes: size of an element.
        whole: for each parameter, whether one rank must own all of it; others are divided between chunks, or rows.
        first: rank to prefer among equal ones for whole parameters: another one for each bucket.
        by_rows: whether rows of dimension 0 are not divided.

    Returns: the rows in the order of their places, and the elements of a segment with its padding, equal for all ranks.
    """
    sizes = [math.prod(shape) for shape in shapes]
    owner, room = _assign_whole(sizes, ranks, whole, first)
    ends, rest = list(accumulate(room)), sum(size for size, is_whole in zip(sizes, whole, strict=True) if not is_whole)
    found: list[tuple[int, int, int, int, bool]] = []  # index, begin, end, rank, flat
    before = 0
    for index, (shape, size) in enumerate(zip(shapes, sizes, strict=True)):
        if index in owner:
            found.append((index, 0, shape[0] if shape else 1, owner[index], False))
            continue
        row, step = chunk(shape, by_rows=by_rows)
        if ranks >= _MANY_RANKS and size:
            finer = max(1, sum(sizes) // (_FINER * ranks) // _ALIGNED) * _ALIGNED
            if row > finer and not by_rows:
                row, step = 1, finer
            step = min(step, max(1, finer // row))
        begin, rows, flat = 0, size // row if row else 0, row < math.prod(shape[1:])
        while begin < rows and size:  # steps with their middle before the end of a rank's room are its own
            middle = before + (begin + min(begin + step, rows)) * row // 2
            rank = min(ranks - 1, bisect_right(ends, middle * ends[-1] // rest))
            after = -(-ends[rank] * rest // ends[-1]) - before  # the least middle of a step of a later rank
            end = min(rows, max(begin + step, -(-(-(-2 * after // (step * row)) - 1) // 2) * step))
            if rank == ranks - 1 or (end + step > rows and (end + rows) * row // 2 < after):  # the last step is shorter
                end = rows
            found.append((index, begin, end, rank, flat))
            begin = end
        before += size
    used = [0] * ranks
    starts = []
    for index, begin, end, rank, flat in found:
        starts.append(used[rank])
        used[rank] += padded((end - begin) * (1 if flat else math.prod(shapes[index][1:])), item_bytes)
    segment = max(used)
    return [Rows(*rows, rows[3] * segment + start) for rows, start in zip(found, starts, strict=True)], segment
