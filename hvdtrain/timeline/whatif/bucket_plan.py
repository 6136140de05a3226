"""Plan the buckets of a job by the rules of the exchange. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hvdtrain.compression.sizes import ITEM_BYTES, Bucket, packed
from hvdtrain.compression.table import Compression
from hvdtrain.plan.buckets import Sizes, are_few, assign


@dataclass(frozen=True)
class Gradient:
    """The gradient of one parameter.

    Attributes:
        ready_s: when it is ready, from the start of the last backward pass; None if backward skips it.
        pack_s: time to pack it into its bucket.
        rows: rows that are not zero on one rank; None if nobody counted them.
        state_bytes: of the optimizer's state, for each element, and besides; None if unknown.
        summed_by: share of all ranks that sum it. The others have other parts of a divided model.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    ready_s: float | None = None
    pack_s: float = 0.0
    rows: int | None = None
    state_bytes: tuple[float, float] | None = None
    summed_by: float = 1.0

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def spread_evenly(gradients: Sequence[Gradient], backward_s: float) -> list[Gradient]:
    """Let backward finish the gradients in this order, each after a time in proportion to its size."""
    whole, size, spread = sum(gradient.nbytes for gradient in gradients), 0, []
    for gradient in gradients:
        size += gradient.nbytes
        spread.append(replace(gradient, ready_s=backward_s * size / max(whole, 1)))
    return spread


@dataclass(frozen=True)
class PlannedBucket:
    """A bucket.

    Attributes:
        names: of its gradients, in the order in which backward finishes them.
        shape: what the size of its payloads depends on.
        starts: first element of each gradient.
        rows: rows sent instead of the whole gradient, over all ranks; 0 to send all of it.
        summed_by: share of all ranks that sum it.
    """

    names: Sequence[str]
    shape: Bucket
    starts: Sequence[int]
    rows: int = 0
    summed_by: float = 1.0

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.shape.length * ITEM_BYTES[self.shape.dtype]

    def collectives(self, compression: Compression, ranks: int) -> list[tuple[str, float]]:
        """Return kind and bytes of each collective in one exchange, in order."""
        if self.rows:
            item = ITEM_BYTES[self.shape.dtype] if compression.exact else 2
            width = math.prod(self.shape.shapes[0][1:])
            return [("allgather", 4.0 * self.rows / ranks), ("allreduce", float(item * self.rows * width))]
        return compression.collectives(self.shape, ranks)


def plan_buckets(
    gradients: Sequence[Gradient], limit_bytes: int, compression: Compression, ranks: int, work: float = 1.0
) -> list[PlannedBucket]:
    """Plan the buckets of a job.

    The gradients are in the order in which backward finishes them; those that it skips come last. `work` is the samples
    per rank, relative to the run in which rows were counted.
    """
    by_name = {gradient.name: gradient for gradient in gradients}
    rows = _rows_to_send(by_name, compression, ranks, work)
    sizes: Sizes = {g.name: (g.nbytes, (g.dtype, g.summed_by)) for g in reversed(gradients)}
    made = assign(sizes, limit_bytes, [g.name for g in gradients if g.ready_s is not None], rows=rows)
    return [lay_out([by_name[name] for name in bucket], rows.get(bucket[0], 0)) for bucket in made.buckets]


def _rows_to_send(by_name: Mapping[str, Gradient], compression: Compression, ranks: int, work: float) -> dict[str, int]:
    """Return the number of rows, over all ranks, of each gradient that is sent as rows."""
    rows = {}
    for name, gradient in by_name.items():
        count = math.ceil((gradient.rows or 0) * work) * ranks
        if count and are_few(count, gradient.shape[0]):
            bucket = lay_out([gradient]).shape
            if compression.leaves_to_rows(bucket, count, ranks):
                rows[name] = count
    return rows


def lay_out(gradients: Sequence[Gradient], rows: int = 0) -> PlannedBucket:
    """Return a bucket of these gradients, of one dtype, that the same ranks sum."""
    starts, length = packed((math.prod(gradient.shape) for gradient in gradients), ITEM_BYTES[gradients[0].dtype])
    shape = Bucket([gradient.shape for gradient in gradients], gradients[0].dtype, length)
    return PlannedBucket([gradient.name for gradient in gradients], shape, starts, rows, gradients[0].summed_by)
