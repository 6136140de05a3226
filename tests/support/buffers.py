"""Which buffers of older buckets are alive when new ones are made."""

from __future__ import annotations

import pytest
from torch.multiprocessing.reductions import StorageWeakRef

from hvdtrain.exchange.bucket_exchange import BucketExchange
from hvdtrain.exchange.reducer import Reducer
from hvdtrain.plan.buckets import BucketPlan


def watch_buffers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by the number of older buffers that are alive when a reducer makes new buckets."""
    alive: list[int] = []
    older: list[StorageWeakRef] = []
    make = Reducer._make_exchange

    def watched(self: Reducer, plan: BucketPlan) -> BucketExchange:
        alive.append(sum(not storage.expired() for storage in older))
        exchange = make(self, plan)
        older.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in exchange.buffers())
        return exchange

    monkeypatch.setattr(Reducer, "_make_exchange", watched)
    return alive
