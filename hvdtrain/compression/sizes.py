"""The sizes of buckets and of what each compressor sends, for exchange and predictions. Pure; needs no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

Payload = dict[str, int]  # bytes that a rank hands to each kind of collective in one exchange of a bucket

ITEM_BYTES = {"complex128": 16, "complex64": 8, "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
_LINE = 64  # elements. The shard of a rank starts at a cache line, whatever the dtype.
_ALIGNMENT = 64  # bytes. A gradient's view starts at a cache line, where vector instructions are fast.


@dataclass(frozen=True)
class Bucket:
    """The facts about a bucket that sizes depend on."""

    shapes: Sequence[Sequence[int]]  # of the gradients
    dtype: str  # of the gradients, by torch's name: "float32"
    length: int  # elements, including gaps between gradients


_SHARD_BUCKETS = 16  # default number of buckets of a small model, where their memory is not divided among ranks
_SHARD_RANK_BYTES = 1 << 20
"""Least default size of such a bucket for each rank, so that each rank owns several chunks of it."""


def shard_bucket_bytes(
    limit_bytes: int, total_bytes: int, ranks: int, whole: Iterable[tuple[Sequence[int], int]] = ()
) -> int:
    """Return the default size limit of a bucket, where its sums are divided among ranks.

    `limit_bytes` is that of other buckets, `total_bytes` the size of all gradients, `whole` shape and bytes of those
    that one rank must own. A bucket has one of these for each rank, if there are two or more of that shape. It takes no
    more memory than a bucket of one, because segments of all ranks are equally long.
    """
    shapes = Counter((tuple(shape), nbytes) for shape, nbytes in whole)
    largest = max((nbytes for (_, nbytes), count in shapes.items() if count > 1), default=0)
    return max(min(limit_bytes, total_bytes // _SHARD_BUCKETS), ranks * max(_SHARD_RANK_BYTES, largest))


def padded(count: int, item_bytes: int) -> int:
    """Return the elements that a gradient of `count` takes in a bucket, with the gap after it."""
    step = max(1, _ALIGNMENT // item_bytes)
    return -(-count // step) * step


def packed(counts: Iterable[int], item_bytes: int) -> tuple[list[int], int]:
    """Return where gradients of `counts` elements begin in a bucket, and its length in elements."""
    *starts, length = accumulate((padded(count, item_bytes) for count in counts), initial=0)
    return starts, length


def shard_length(length: int, ranks: int, multiple: int = _LINE) -> int:
    """Return the elements in the shard of each rank: equal on all ranks, and a multiple of `multiple`."""
    return -(-length // (ranks * multiple)) * multiple


def plain(bucket: Bucket, ranks: int, number: float) -> Payload:
    """Uncompressed; bfloat16 as fp32."""
    return {"allreduce": bucket.length * (4 if bucket.dtype == "bfloat16" else ITEM_BYTES[bucket.dtype])}


def fp16(bucket: Bucket, ranks: int, number: float) -> Payload:
    """Two bytes per element; bfloat16 gradients as `bf16`."""
    return bf16(bucket, ranks, number) if bucket.dtype == "bfloat16" else {"allreduce": 2 * bucket.length}


def bf16(bucket: Bucket, ranks: int, number: float) -> Payload:
    """All shards to their owners, and each owner's shard to all."""
    mine = 2 * shard_length(bucket.length, ranks)
    return {"alltoall": ranks * mine, "allgather": mine} if mine else {}


def rows(shape: Sequence[int], count: int, item_bytes: int) -> Payload:
    """Return the payload of a gradient with `count` non-zero rows: row numbers of each rank, then the rows."""
    return {"allgather": 4 * count, "allreduce": item_bytes * count * math.prod(shape[1:])}


def sent_bytes(payload: Payload, ranks: int) -> float:
    """Return the bytes that a rank sends for a payload, by the algorithms that send least (a ring, or direct sends)."""
    part = (ranks - 1) / ranks
    share = {"allreduce": 2 * part, "alltoall": part, "reducescatter": part, "allgather": ranks - 1}
    return sum(size * share[kind] for kind, size in payload.items())


BLOCK = 256  # elements with a common scale: scales add 1.6% of bytes, and one large value affects only its block


def int8_row(length: int, ranks: int) -> tuple[int, int]:
    """Return the elements and the bytes of a rank's shard: a code per element and an fp32 scale per block."""
    mine = shard_length(length, ranks, BLOCK)
    return mine, mine + mine // BLOCK * 4


def int8(bucket: Bucket, ranks: int, number: float) -> Payload:
    """All shards to their owners, and each owner's shard to all."""
    mine, row = int8_row(bucket.length, ranks)
    return {"alltoall": ranks * row, "allgather": row} if mine else {}


INT16_REACH = 1 << 16  # elements that a 16-bit offset can address


@dataclass(frozen=True)
class TopKPlan:
    """The format of the largest elements of a bucket: fp32 values, then their indices.

    `coding`: of indices: "int32"; "int16", offsets in blocks of 65536 elements after the count of each block in int32;
    "bitmap", a bit for each element of the bucket.
    """

    count: int  # number of elements
    coding: str
    index_bytes: int  # size of the indices
    row_bytes: int  # size of values and indices, a multiple of 4


def topk_plan(length: int, portion: float) -> TopKPlan:
    """Return the smallest format. It depends on the bucket's length alone, so payload sizes are the same each step."""
    count = min(math.ceil(portion * length), length)
    index_bytes = {"int32": 4 * count, "int16": 4 * -(-length // INT16_REACH) + 2 * count, "bitmap": -(-length // 8)}
    coding = min(index_bytes, key=lambda name: index_bytes[name])
    return TopKPlan(count, coding, index_bytes[coding], -(-(4 * count + index_bytes[coding]) // 4) * 4)


def topk(bucket: Bucket, ranks: int, number: float) -> Payload:
    """The row of each rank to all."""
    row = topk_plan(bucket.length, number).row_bytes
    return {"allgather": row} if row else {}


_WORTH = 2  # two factors must be smaller than their matrix by this factor, because they need an orthogonalization


def matrix_sides(shape: Sequence[int], rank: int) -> tuple[int, int] | None:
    """Return rows and columns of a gradient that is sent as two factors of `rank`; None if it is sent uncompressed.

    A gradient of more than two dimensions is cut where the sum of rows and columns is smallest: a convolution's
    (out, in, 3, 3) after the first dimension, the weights of experts, (experts, out, in), before the last one.
    """
    if len(shape) < 2:
        return None
    cuts = [(math.prod(shape[:cut]), math.prod(shape[cut:])) for cut in range(1, len(shape))]
    rows, columns = min(cuts, key=sum)
    return (rows, columns) if 0 < _WORTH * rank * (rows + columns) <= rows * columns else None


def powersgd(bucket: Bucket, ranks: int, number: float) -> Payload:
    """Two factors of each matrix, and all other gradients, in fp32."""
    rank = int(number)
    found = [(matrix_sides(shape, rank), math.prod(shape)) for shape in bucket.shapes]
    elements = sum(rank * sum(sides) if sides else count for sides, count in found)
    return {"allreduce": 4 * elements} if elements else {}


OUTER_BLOCKS = {"int8": (8, 256, 1), "int4": (4, 128, 1), "int2": (2, 256, 2)}
"""Bits of a code, values of a block, and its fp32 scales. Smaller blocks have smaller errors, and more scales."""

OUTER_CHUNK = 4096  # values of a chunk. A share of them is sent, with positions of 12 bits.


def outer_count(share: float) -> int:
    """Return the number of values that are sent of each chunk."""
    return max(1, round(share * OUTER_CHUNK))


def outer_payload(name: str, number: float, length: int) -> int:
    """Return the bytes of the encoded change of a worker, of `length` values.

    `name` and `number` are those of a coding in `compression.outer`; "none" has fp32 values.
    """
    if name in OUTER_BLOCKS:
        bits, block, scales = OUTER_BLOCKS[name]
        return -(-length // block) * (block * bits // 8 + 4 * scales)
    if name == "topk":
        count = outer_count(number)
        positions, signs = -(-count // 2) * 3, -(-count // 4)
        return -(-(-(-length // OUTER_CHUNK) * (positions + signs + 8)) // 4) * 4
    return length * (2 if name == "bf16" else 4)
