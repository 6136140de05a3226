"""Divide the update of parameters among the ranks that hold copies of them: ZeRO-1 and ZeRO-2.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020. torch's
ZeroRedundancyOptimizer is not used: each rank sums all gradients with it, and it sends whole parameters one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Size, Tensor, nn

from hvdtrain.comm.base import Comm
from hvdtrain.exchange.bucket_exchange import BucketQueue
from hvdtrain.exchange.buckets import Named, assign_buckets, lay_out
from hvdtrain.exchange.shard_bucket import ShardBucket, Shared
from hvdtrain.plan.collectives import AT_ONCE
from hvdtrain.spans import Spans
from hvdtrain.state.exchange_state import Owned


class AtOwners:
    """Sums gradients at the owners of their rows (reduce-scatter); a bucket then sends updated rows to all (allgather).

    Args:
        comm: the ranks with copies.
        bucket_bytes: size limit of a bucket.
        name: prefix of the collectives' names.
        whole: returns for each parameter whether one rank must own all of it.
        make_bucket: default: one that is not encoded.
        weight: applied to each gradient before the exchange.
        limited: whether only as many buckets are exchanged at once as the memory for all sums has room for. They start
            in their order then; so there may be one such exchange only.
        on_host: as of `Shared`, like by_rows.

    Attributes:
        buckets: in the order in which backward fills them.
    """

    def __init__(
        self,
        comm: Comm,
        bucket_bytes: int,
        spans: Spans,
        name: str,
        whole: Callable[[Sequence[nn.Parameter]], list[bool]],
        make_bucket: Callable[[Shared], ShardBucket] = ShardBucket,
        *,
        weight: float = 1.0,
        limited: bool = False,
        on_host: bool = False,
        by_rows: bool = False,
    ) -> None:
        self._comm, self._bucket_bytes, self._spans, self._name, self._whole = comm, bucket_bytes, spans, name, whole
        self._weight, self._limited, self._make = weight, limited, make_bucket
        self._on_host, self._by_rows = on_host, by_rows
        self.ranks = comm.size
        self.buckets: list[ShardBucket] = []
        self._queue = BucketQueue([], weight, spans)

    def add(self, named: Named) -> None:
        """Exchange these parameters, too, in the model's order; frozen ones are in buckets of their own."""
        for is_trained in (True, False):
            part = [(name, p) for name, p in named if p.requires_grad == is_trained and p.numel()]
            prefix = f"{self._name}/{len(self.buckets)}" if self.buckets else self._name
            for layout in lay_out(assign_buckets(part, self._bucket_bytes), dict(part), prefix):
                whole, number = self._whole(layout.parameters), len(self.buckets)
                shared = Shared(layout, self._comm, whole, number, self._on_host, self._by_rows)
                self.buckets.append(self._make(shared))
        self._queue = BucketQueue(self.buckets, self._weight, self._spans, self.limit_bytes if self._limited else 0)

    @property
    def limit_bytes(self) -> int:
        """Memory of exchanges at the same time: more while memory is free that the sums will take."""
        return AT_ONCE * self._bucket_bytes + sum(bucket.segment_bytes for bucket in self.buckets)

    def owned(self) -> dict[str, Owned]:
        """Return what this rank owns of each parameter, by name; owners are ranks of `comm`."""
        return {name: owned for bucket in self.buckets for name, owned in bucket.owned().items()}

    def bucket_of(self) -> Mapping[str, ShardBucket]:
        """Return the bucket of each parameter, by name."""
        return {part.name: bucket for bucket in self.buckets for part in bucket.layout.shape.parts}

    def clear(self) -> None:
        """Free the sums."""
        for bucket in self.buckets:
            bucket.clear()

    def begin(self) -> None:
        """Free the sums of the last step, and start another one."""
        self.clear()
        self._queue.begin()

    def add_gradient(self, name: str) -> None:
        """Pack the gradient of a parameter, and start the exchange of its bucket if it is full."""
        self._queue.add_gradient(name)

    def end_pass(self) -> None:
        """Wait for the sums of a pass, to which those of the next one are added (ZeRO-2). Collective: yes."""
        self._queue.wait()
        self._queue.begin()

    def finish(self) -> list[Tensor]:
        """Return the sums of what this rank owns; they are gradients now. Collective: yes."""
        return self._queue.finish()

    def shapes(self) -> list[Size]:
        """Return the shapes of the whole parameters of the sums."""
        return [shape for bucket in self.buckets for shape in bucket.shapes()]

    def to_gather(self) -> list[ShardBucket]:
        """Return the buckets that send updated rows to all ranks, in the order of the forward pass."""
        return [bucket for bucket in reversed(self.buckets) if bucket.is_trained]

    def parameter_names(self) -> dict[str, list[str]]:
        """Return the names of each bucket's parameters, by the prefix of its collectives' names."""
        return self._queue.parameter_names()

    def buffers(self) -> list[Tensor]:
        """Return the memory of the buckets."""
        return [buffer for bucket in self.buckets for buffer in bucket.buffers()]
