"""The exchange of the buckets of one plan: each starts when backward has filled it, and `finish` waits for all."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from hvdtrain.comm.base import Comm
from hvdtrain.compression.table import Compression
from hvdtrain.exchange.backward_passes import second_gradient
from hvdtrain.exchange.bucket import Bucket, DenseBucket, SideStream
from hvdtrain.exchange.buckets import Layout, lay_out
from hvdtrain.exchange.in_order import InOrder, Leaves
from hvdtrain.exchange.rows import RowBucket, SparseBucket
from hvdtrain.plan.buckets import BucketPlan
from hvdtrain.spans import EXCHANGE, Spans


class BucketQueue:
    """Starts the exchange of each bucket when it is full, and waits for all.

    Args:
        buckets: equal on all ranks.
        weight: applied to each gradient before the exchange.
        spans: records each exchange, from its start until it was waited for.
        limit_bytes: of the memory of exchanges that run at the same time, and of the sums that remain; 0 for no limit.
            One exchange may always run. With a limit, buckets start in their order: ranks that started different ones
            could wait for each other.
    """

    def __init__(self, buckets: Sequence[Bucket], weight: float, spans: Spans, limit_bytes: int = 0) -> None:
        self._buckets = buckets
        self._limit_bytes = limit_bytes
        self._next = 0  # bucket to start, if there is a limit
        self._begun: set[int] = set()  # buckets with a gradient, if there is a limit
        self._weight = weight
        self._spans = spans
        spans.labels.update({EXCHANGE + number: _facts(b.layout) for number, b in enumerate(buckets)})
        self._streams = [SideStream(bucket.layout.shape.device) for bucket in buckets]
        self._start_ns = [0] * len(buckets)
        self._running: deque[int] = deque()  # buckets, by the start of their current collectives
        self._positions = {
            part.name: (number, index)
            for number, bucket in enumerate(buckets)
            for index, part in enumerate(bucket.layout.shape.parts)
        }

    def begin(self) -> None:
        """Start another step."""
        self._running.clear()
        self._next = 0
        self._begun.clear()
        for bucket in self._buckets:
            bucket.begin()

    def add_gradient(self, name: str) -> None:
        """Pack the gradient of a parameter, and advance exchanges until one of them has to wait.

        Collectives end about in the order of their starts, so the cost does not grow with the number of buckets.

        Errors: CallOrderError: it was packed before in this step.
        """
        number, index = self._positions[name]
        bucket = self._buckets[number]
        if index not in bucket.missing:
            raise second_gradient(name)
        if self._limit_bytes and number not in self._begun:
            self._begun.add(number)
            self._make_room(number)
        bucket.pack(index, self._weight)
        self._streams[number].record_packed()
        if self._limit_bytes:
            while self._next < len(self._buckets) and not self._buckets[self._next].missing:
                self._make_room(self._next)
                self._start(self._next)
                self._next += 1
        elif not bucket.missing and bucket.eager:
            self._start(number)
        while self._running and self._advance(self._running[0]):
            self._queue(self._running.popleft())

    def finish(self) -> list[Tensor]:
        """Start the remaining buckets, wait for all, and return the sums by parameter. Collective: yes."""
        self.wait()
        return [gradient for bucket in self._buckets for gradient in bucket.set_gradients()]

    def wait(self) -> None:
        """Start the remaining buckets, and wait for all. Collective: yes."""
        for number, bucket in enumerate(self._buckets):
            if not bucket.started:
                if self._limit_bytes:
                    self._make_room(number)
                for index in sorted(bucket.missing):  # backward skipped them
                    bucket.pack(index, self._weight)
                self._streams[number].record_packed()
                self._start(number)
        while self._running:  # advance all; wait for one only if none can advance
            moved = [number for number in self._running if self._advance(number)]
            if not moved:
                moved = [self._running[0]]
                self._streams[moved[0]].run(self._buckets[moved[0]].wait)
            for number in moved:
                self._running.remove(number)
                self._queue(number)
        for stream in self._streams:
            stream.join()

    def parameter_names(self) -> dict[str, list[str]]:
        """Return the names of each bucket's parameters, by the prefix of its collectives' names."""
        return {b.layout.shape.name: [part.name for part in b.layout.shape.parts] for b in self._buckets}

    def _make_room(self, number: int) -> None:
        """Wait for the oldest exchanges until a bucket fits within the limit."""
        while self._running:
            exchanged = sum(self._buckets[each].exchange_bytes for each in (*self._running, number))
            if exchanged + sum(bucket.kept_bytes for bucket in self._buckets) <= self._limit_bytes:
                return
            first = self._running.popleft()
            self._streams[first].run(self._buckets[first].wait)
            self._queue(first)

    def _start(self, number: int) -> None:
        self._start_ns[number] = self._spans.now()
        self._streams[number].run(self._buckets[number].start)
        self._queue(number)

    def _advance(self, number: int) -> bool:
        return self._streams[number].run(self._buckets[number].advance)

    def _queue(self, number: int) -> None:
        """Queue a bucket that has started a collective; record its exchange if that has finished instead."""
        if self._buckets[number].running:
            self._running.append(number)
        else:
            self._spans.record("exchange", self._start_ns[number], EXCHANGE + number)


class BucketExchange(BucketQueue):
    """Exchanges the gradients of a plan's parameters. The plan is equal on all ranks; for the rest see `Reducer`.

    Attributes:
        compressors: of the buckets that have one.
        layouts: of these buckets.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Mapping[str, nn.Parameter],
        comm: Comm,
        compression: Compression,
        weight: float,
        factor: float,
        name: str,
        spans: Spans,
        *,
        as_views: bool,
        leaves: Leaves | None = None,
    ) -> None:
        self.plan = plan
        make = compression.load() if leaves is None else partial(InOrder, leaves=leaves)

        def bucket(layout: Layout) -> Bucket:
            first = layout.shape.parts[0].name
            if first in plan.sparse:
                return SparseBucket(layout, factor, comm, as_views=as_views)
            rows = plan.rows.get(first) if leaves is None else None
            if rows and compression.leaves_to_rows(layout.shape.sizes, rows, comm.size):
                return RowBucket(layout, factor, comm, exact=compression.exact_rows, as_views=as_views)
            return DenseBucket(layout, factor, make(layout.shape, comm), as_views=as_views)

        super().__init__([bucket(layout) for layout in lay_out(plan, parameters, name)], weight, spans)
        self._dense = [b for b in self._buckets if isinstance(b, DenseBucket)]
        self.compressors = [bucket.compressor for bucket in self._dense]
        self.layouts = [bucket.layout for bucket in self._dense]

    def add_residuals(self, residuals: Mapping[str, Tensor]) -> None:
        """Add these residuals, by parameter, to each step's gradients until the next call."""
        for bucket in self._dense:
            names = [part.name for part in bucket.layout.shape.parts]
            bucket.residuals = {index: residuals[name] for index, name in enumerate(names) if name in residuals}

    def revised_plan(self) -> BucketPlan | None:
        """Return a plan without rows for gradients that had many in the last step; None if there are none.

        Equal on all ranks.
        """
        rows = [b for b in self._buckets if isinstance(b, RowBucket)]
        many = {b.layout.shape.parts[0].name for b in rows if b.count > len(b.layout.parameters[0]) / 2}
        return self.plan.without_rows(many) if many else None

    def start_times_ns(self) -> list[int]:
        """Return when the exchange of each dense bucket last started."""
        return [ns for ns, bucket in zip(self._start_ns, self._buckets, strict=True) if isinstance(bucket, DenseBucket)]

    def buffers(self) -> list[Tensor]:
        """Return the buffers of all buckets."""
        return [buffer for b in self._dense for buffer in (b.out, *b.compressor.buffers())]


def _facts(layout: Layout) -> dict[str, Any]:
    """Return the facts about a bucket for traces: the fields of `hvdtrain.timeline.columns.BucketFacts`."""
    shape = layout.shape
    return {
        "name": shape.name,
        "parameters": [part.name for part in shape.parts],
        "shapes": [list(sizes) for sizes in shape.sizes.shapes],
        "dtype": str(shape.dtype).removeprefix("torch."),
        "length": shape.length,
    }
