"""Sum gradients that an engine hands over, over the ranks that hold copies of the same part of a model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from hvdtrain.comm.base import Comm
from hvdtrain.compression.base import Figures
from hvdtrain.compression.table import Compression
from hvdtrain.exchange.active_buckets import ActiveBuckets, DetachedState
from hvdtrain.exchange.bucket_exchange import BucketExchange
from hvdtrain.exchange.buckets import assign_buckets
from hvdtrain.spans import Spans


class BetweenCopies(ActiveBuckets):
    """The exchange of what a rank holds with those ranks that hold the same.

    Args:
        named: parameters, in the order in which backward finishes them; equal on these ranks.
        comm: these ranks.
        bucket_bytes: size limit of a bucket.
        name: prefix of the collectives' names.
    """

    def __init__(
        self,
        named: list[tuple[str, nn.Parameter]],
        comm: Comm,
        compression: Compression,
        bucket_bytes: int,
        spans: Spans,
        name: str,
    ) -> None:
        super().__init__(comm, compression, partial(BucketExchange, name=name, spans=spans, as_views=True))
        self.named = named
        self._plan = assign_buckets(named, bucket_bytes, [name for name, _ in named])
        self.adopt(self._plan)

    @property
    def _queue(self) -> BucketExchange:
        assert self.exchange is not None
        return self.exchange

    def load_state_dict(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Load the residuals of as many copies as the values say."""
        self.exchange, self.detached = None, DetachedState(tensors, int(values["ranks"]))
        self.adopt(self._plan)

    def begin(self) -> None:
        """Start a step."""
        self._figures = None
        self._queue.begin()

    def add_gradient(self, name: str) -> None:
        """Pack the gradient of a parameter, and start the exchange of its bucket if it is full."""
        self._queue.add_gradient(name)

    def finish(self) -> list[Tensor]:
        """Return the sums; they are gradients now. Collective: yes."""
        sums = self._queue.finish()
        self._figures = Figures(self._queue.compressors)
        return sums
