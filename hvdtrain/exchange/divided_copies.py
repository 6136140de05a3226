"""Divide the update of a part of a model among the ranks that hold copies of it (ZeRO)."""

from __future__ import annotations

from torch import Tensor, nn

from hvdtrain.comm.base import Comm
from hvdtrain.exchange.bucket_exchange import BucketQueue
from hvdtrain.exchange.buckets import assign_buckets, lay_out
from hvdtrain.exchange.shard_bucket import ShardBucket
from hvdtrain.spans import Spans
from hvdtrain.state.exchange_state import Owned

_AT_ONCE = 2
"""Further buckets that are sent at the same time: each has the updated rows of all copies."""


class DividedCopies:
    """Sums gradients at the owners of their rows, and sends updated rows to the other copies.

    Args:
        named: parameters, in the order in which backward finishes them; equal on these ranks.
        whole: for each of them, whether one rank must own all of it.
        comm: these ranks.
        bucket_bytes: size limit of a bucket.
        name: prefix of the collectives' names.
    """

    def __init__(
        self,
        named: list[tuple[str, nn.Parameter]],
        whole: list[bool],
        comm: Comm,
        bucket_bytes: int,
        spans: Spans,
        name: str,
    ) -> None:
        must_own = {parameter: each for (_, parameter), each in zip(named, whole, strict=True)}
        layouts = lay_out(assign_buckets(named, bucket_bytes, [name for name, _ in named]), dict(named), name)
        self._buckets = [
            ShardBucket(layout, comm, [must_own[p] for p in layout.parameters], first=number)
            for number, layout in enumerate(layouts)
        ]
        self._queue = BucketQueue(self._buckets, 1.0, spans)
        self.ranks = comm.size

    def owned(self) -> dict[str, Owned]:
        """Return what this rank owns of each parameter, by name; owners are ranks of these copies."""
        return {name: owned for bucket in self._buckets for name, owned in bucket.owned().items()}

    def begin(self) -> None:
        """Start a step."""
        for bucket in self._buckets:
            bucket.clear()
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

    def spread(self) -> None:
        """Send what this rank has updated to the other copies. Collective: yes."""
        for bucket in self._buckets:
            bucket.clear()
        for number, bucket in enumerate(self._buckets):
            bucket.start_gather()
            if number >= _AT_ONCE:
                self._buckets[number - _AT_ONCE].finish_gather()
        for bucket in self._buckets[-_AT_ONCE:]:
            bucket.finish_gather()

    def parameter_names(self) -> dict[str, list[str]]:
        """Return the names of each bucket's parameters, by the prefix of its collectives' names."""
        return self._queue.parameter_names()

    def buffers(self) -> list[Tensor]:
        """Return the memory of the buckets."""
        return [buffer for bucket in self._buckets for buffer in bucket.buffers()]
