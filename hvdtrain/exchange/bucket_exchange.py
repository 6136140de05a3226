"""The buckets of one plan, each on its way as soon as backward has filled it, and all of them taken to their end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from hvdtrain.comm.base import Comm
from hvdtrain.compression.table import Compression
from hvdtrain.errors import CallOrderError
from hvdtrain.exchange.bucket import Bucket, SideStream
from hvdtrain.exchange.buckets import Layout, Plan, lay_out
from hvdtrain.exchange.dense import DenseBucket
from hvdtrain.exchange.rows import RowBucket
from hvdtrain.exchange.sparse import SparseBucket
from hvdtrain.spans import EXCHANGE, Spans


class BucketExchange:
    """Gradients of the parameters of a plan.

    Args:
        agreed: the plan, the same on all ranks.
        of: parameters by name.
        comm: the ranks.
        compression: how dense ones travel.
        weight: what each gradient is multiplied by before the exchange.
        factor: what each sum is multiplied by after it.
        name: what the collectives' names begin with.
        spans: told of each exchange, from its start until it was waited for.
        as_views: whether gradients become views of the buckets.

    Attributes:
        plan: as given.
        compressors: one for each bucket that has one.
        layouts: of those.
    """

    def __init__(
        self,
        agreed: Plan,
        of: Mapping[str, nn.Parameter],
        comm: Comm,
        compression: Compression,
        weight: float,
        factor: float,
        name: str,
        spans: Spans,
        *,
        as_views: bool,
    ) -> None:
        self.plan = agreed
        self._weight = weight
        self._spans = spans
        make = compression.load()

        def bucket(layout: Layout) -> Bucket:
            first = layout.shape.parts[0].name
            if first in agreed.sparse:
                return SparseBucket(layout, comm, factor, as_views=as_views)
            rows = agreed.rows.get(first)
            if rows and compression.leaves_to_rows(layout.shape.sizes, rows, comm.size):
                return RowBucket(layout, comm, factor, exact=compression.exact_rows, as_views=as_views)
            return DenseBucket(layout, make(layout.shape, comm), factor, as_views=as_views)

        self._buckets = [bucket(layout) for layout in lay_out(agreed, of, name)]
        spans.labels.update({EXCHANGE + number: _facts(b.layout) for number, b in enumerate(self._buckets)})
        self._sides = [SideStream(bucket.layout.shape.device) for bucket in self._buckets]
        self._began = [0] * len(self._buckets)
        self._places = {
            part.name: (number, index)
            for number, bucket in enumerate(self._buckets)
            for index, part in enumerate(bucket.layout.shape.parts)
        }
        self._dense = [bucket for bucket in self._buckets if isinstance(bucket, DenseBucket)]
        self.compressors = [bucket.compressor for bucket in self._dense]
        self.layouts = [bucket.layout for bucket in self._dense]

    def begin(self) -> None:
        """Expect the gradients of another step."""
        for bucket in self._buckets:
            bucket.begin()

    def arrived(self, name: str) -> None:
        """The gradient of this parameter is there.

        Errors:
            CallOrderError: it was there before in this step.
        """
        number, index = self._places[name]
        bucket = self._buckets[number]
        if bucket.holds(index):
            raise CallOrderError(
                f"{name} got its gradient a second time, when it was on its way already",
                next_step="run backward once a step, or as often as backward_passes_per_step says; checkpoint"
                " activations with use_reentrant=False",
            )
        bucket.put(index, self._weight)
        self._sides[number].packed()
        if bucket.missing == 0 and bucket.eager:
            self._start(number)
        for number, bucket in enumerate(self._buckets):
            if bucket.running and self._sides[number].run(bucket.advance):
                self._note(number)

    def finish(self) -> list[Tensor]:
        """Send what is left, zero where there is no gradient, and wait; the sums by parameter. Collective: yes."""
        for number, bucket in enumerate(self._buckets):
            if not bucket.started:
                bucket.put_rest(self._weight)
                self._sides[number].packed()
                self._start(number)
        self._drive()
        for side in self._sides:
            side.join()
        return [gradient for bucket in self._buckets for gradient in bucket.give()]

    def deliver(self, owed: Mapping[str, Tensor]) -> None:
        """Add these residuals, by parameter, to the gradients when they are packed, until the next call."""
        for bucket in self._dense:
            names = [part.name for part in bucket.layout.shape.parts]
            bucket.owed = {index: owed[name] for index, name in enumerate(names) if name in owed}

    def crowded(self) -> Plan | None:
        """The plan without rows where there were many after all, none where that is this one; equal on all ranks."""
        rows = [b for b in self._buckets if isinstance(b, RowBucket)]
        many = {b.layout.shape.parts[0].name for b in rows if b.count > len(b.layout.parameters[0]) / 2}
        return self.plan.without_rows(many) if many else None

    def carried(self) -> dict[str, list[str]]:
        """Names of parameters by what the names of their collectives begin with."""
        return {b.layout.shape.name: [part.name for part in b.layout.shape.parts] for b in self._buckets}

    def buffers(self) -> list[Tensor]:
        """The memory that buckets take."""
        return [buffer for b in self._dense for buffer in (b.out, *b.compressor.buffers())]

    def _start(self, number: int) -> None:
        self._began[number] = self._spans.now()
        self._sides[number].run(self._buckets[number].start)
        self._note(number)

    def _note(self, number: int) -> None:
        if not self._buckets[number].running:
            self._spans.record("exchange", self._began[number], EXCHANGE + number)

    def _drive(self) -> None:
        """Take every exchange to its end, none waiting for another whose turn has not come."""
        running = [number for number, bucket in enumerate(self._buckets) if bucket.running]
        while running:
            moved = [n for n in running if self._sides[n].run(self._buckets[n].advance)]
            if not moved:
                moved = running[:1]
                self._sides[moved[0]].run(self._buckets[moved[0]].wait)
            for number in moved:
                self._note(number)
            running = [number for number in running if self._buckets[number].running]


def _facts(layout: Layout) -> dict[str, Any]:
    """What a trace says of a bucket: the fields of `hvdtrain.timeline.columns.BucketFacts`."""
    shape = layout.shape
    return {
        "name": shape.name,
        "parameters": [part.name for part in shape.parts],
        "shapes": [list(sizes) for sizes in shape.sizes.shapes],
        "dtype": str(shape.dtype).removeprefix("torch."),
        "length": shape.length,
    }
