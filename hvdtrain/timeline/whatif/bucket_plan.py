"""Which buckets a job would have, and what travels of each: by the rules of the exchange itself. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvdtrain.compression.bucket_filling import fill, padded
from hvdtrain.compression.sizes import Bucket
from hvdtrain.compression.table import Compression

_ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
_FEW = 1 / 4
"""Of the rows of a gradient, as in `exchange.agreement`."""


@dataclass(frozen=True)
class Gradient:
    """One parameter's.

    Attributes:
        name, shape, dtype: of the parameter.
        ready_s: since the last backward pass began; None where it left it out.
        pack_s: what putting it into its bucket took.
        rows: of it, not zero on one rank; None where nobody has looked.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    ready_s: float | None = None
    pack_s: float = 0.0
    rows: int | None = None

    @property
    def nbytes(self) -> int:
        """Of all its elements."""
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Planned:
    """A bucket.

    Attributes:
        names: of its gradients, in the order in which backward has them.
        shape: what payloads depend on.
        starts: where each begins.
        rows: how many rows travel in the place of all, over all ranks; 0 where all do.
    """

    names: Sequence[str]
    shape: Bucket
    starts: Sequence[int]
    rows: int = 0

    def collectives(self, compression: Compression, ranks: int) -> list[tuple[str, float]]:
        """Kind and bytes that each rank hands over, one after another."""
        if self.rows:
            item = _ITEM_BYTES[self.shape.dtype] if compression.exact else 2
            width = math.prod(self.shape.shapes[0][1:])
            return [("allgather", 4.0 * self.rows / ranks), ("allreduce", float(item * self.rows * width))]
        payload = compression.payload(self.shape, ranks)
        turns = compression.kind.turns
        return [(kind, size / turns) for kind, size in payload.items() for _ in range(turns)]


def planned(
    gradients: Sequence[Gradient], limit_bytes: int, compression: Compression, ranks: int, work: float = 1.0
) -> list[Planned]:
    """The buckets of a job.

    Args:
        gradients: those that backward has first come first; what it leaves out comes last.
        limit_bytes: of a bucket.
        compression: how they travel.
        ranks: that exchange.
        work: of a rank, over that of the one whose rows were counted.
    """
    of = {gradient.name: gradient for gradient in gradients}
    few = _few(of, compression, ranks, work)
    found = []
    for left_out in (False, True):
        names = [g.name for g in gradients if (g.ready_s is None) == left_out]
        found += fill(names, limit_bytes, lambda name: of[name].nbytes, lambda name: of[name].dtype, few)
    return [_laid_out([of[name] for name in bucket], few.get(bucket[0], 0)) for bucket in found]


def _few(of: Mapping[str, Gradient], compression: Compression, ranks: int, work: float) -> dict[str, int]:
    """Rows over all ranks, of gradients that travel as rows."""
    found = {}
    for name, gradient in of.items():
        count = math.ceil((gradient.rows or 0) * work) * ranks
        if 0 < count <= _FEW * gradient.shape[0]:
            bucket = _laid_out([gradient]).shape
            if compression.leaves_to_rows(bucket, count, ranks):
                found[name] = count
    return found


def _laid_out(gradients: Sequence[Gradient], rows: int = 0) -> Planned:
    item, starts, length = _ITEM_BYTES[gradients[0].dtype], [], 0
    for gradient in gradients:
        starts.append(length)
        length += padded(math.prod(gradient.shape), item)
    shape = Bucket([gradient.shape for gradient in gradients], gradients[0].dtype, length)
    return Planned([gradient.name for gradient in gradients], shape, starts, rows)
