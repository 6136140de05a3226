"""How many elements and bytes each compressor sends: pure, without torch; the compressors go by it themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Payload = dict[str, int]
"""Bytes that a rank hands to each kind of collective in one exchange of a bucket."""

ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
_LINE = 64
"""Elements: shares of ranks start where cache lines do, whatever the dtype."""


@dataclass(frozen=True)
class Bucket:
    """What sizes depend on.

    Attributes:
        shapes: of the gradients.
        dtype: of the gradients, as torch names it: "float32".
        length: elements, gaps between gradients included.
    """

    shapes: Sequence[Sequence[int]]
    dtype: str
    length: int


def share(length: int, ranks: int, multiple: int = _LINE) -> int:
    """Elements of `length` that one rank owns, rounded up so that all own the same, a multiple of `multiple`."""
    return -(-length // (ranks * multiple)) * multiple


def plain(bucket: Bucket, ranks: int, number: float) -> Payload:
    """As they are; bfloat16 as fp32."""
    return {"allreduce": bucket.length * (4 if bucket.dtype == "bfloat16" else ITEM_BYTES[bucket.dtype])}


def fp16(bucket: Bucket, ranks: int, number: float) -> Payload:
    """Two bytes an element; bfloat16 by its own route."""
    return bf16(bucket, ranks, number) if bucket.dtype == "bfloat16" else {"allreduce": 2 * bucket.length}


def bf16(bucket: Bucket, ranks: int, number: float) -> Payload:
    """Everything to the owners, and each owner's share to all."""
    mine = 2 * share(bucket.length, ranks)
    return {"alltoall": ranks * mine, "allgather": mine} if mine else {}


def rows(shape: Sequence[int], count: int, item_bytes: int) -> Payload:
    """Of a gradient of which `count` rows are not zero: which these are on each rank, then what is in them."""
    return {"allgather": 4 * count, "allreduce": item_bytes * count * math.prod(shape[1:])}


def sent_bytes(payload: Payload, ranks: int) -> float:
    """What a rank sends for a payload, by the algorithms that send least (a ring, or each to each)."""
    share = {"allreduce": 2 * (ranks - 1) / ranks, "alltoall": (ranks - 1) / ranks, "allgather": ranks - 1}
    return sum(size * share[kind] for kind, size in payload.items())


BLOCK = 256
"""Elements that share a scale: 1.6% more bytes than none, and one large value spoils the resolution of no more."""


def int8_row(length: int, ranks: int) -> tuple[int, int]:
    """Elements of a rank's share, and the bytes that it takes: a code each, an fp32 scale a block."""
    mine = share(length, ranks, BLOCK)
    return mine, mine + mine // BLOCK * 4


def int8(bucket: Bucket, ranks: int, number: float) -> Payload:
    """Everything to the owners, and each owner's share to all."""
    mine, row = int8_row(bucket.length, ranks)
    return {"alltoall": ranks * row, "allgather": row} if mine else {}


INT16_REACH = 1 << 16
"""Elements that a 16-bit offset tells apart."""


@dataclass(frozen=True)
class TopK:
    """How the largest of a bucket travel: fp32 values, then their places.

    Attributes:
        count: of them.
        coding: of places: "int32"; "int16", offsets in blocks of 65536 after the count of each block in int32;
            "bitmap", a bit for each element of the bucket.
        places: bytes that those take.
        row: bytes of all, a multiple of 4.
    """

    count: int
    coding: str
    places: int
    row: int


def topk_plan(length: int, portion: float) -> TopK:
    """The coding that takes fewest bytes; a function of the bucket's length, so that payloads stay as they are."""
    count = min(math.ceil(portion * length), length)
    takes = {
        "int32": 4 * count,
        "int16": 4 * -(-length // INT16_REACH) + 2 * count,
        "bitmap": -(-length // 8),
    }
    coding = min(takes, key=lambda name: takes[name])
    return TopK(count, coding, takes[coding], -(-(4 * count + takes[coding]) // 4) * 4)


def topk(bucket: Bucket, ranks: int, number: float) -> Payload:
    """A row of each rank to all."""
    row = topk_plan(bucket.length, number).row
    return {"allgather": row} if row else {}


_WORTH = 2
"""By how much two factors have to be smaller than their matrix: each element of them costs an orthogonalisation."""


def matrix(shape: Sequence[int], rank: int) -> tuple[int, int] | None:
    """Rows and columns of what is sent as two factors of `rank`, None where it is sent as it is.

    Of more than two dimensions the leading ones are rows, as many of them as make rows and columns fewest: a
    convolution's (out, in, 3, 3) is cut behind the first, the weights of experts, (experts, out, in), before the last.
    """
    if len(shape) < 2:
        return None
    cuts = [(math.prod(shape[:cut]), math.prod(shape[cut:])) for cut in range(1, len(shape))]
    rows, columns = min(cuts, key=sum)
    return (rows, columns) if 0 < _WORTH * rank * (rows + columns) <= rows * columns else None


def powersgd(bucket: Bucket, ranks: int, number: float) -> Payload:
    """Two factors of each matrix in fp32, and all else."""
    rank = int(number)
    found = [(matrix(shape, rank), math.prod(shape)) for shape in bucket.shapes]
    elements = sum(rank * sum(sides) if sides else count for sides, count in found)
    return {"allreduce": 4 * elements} if elements else {}
