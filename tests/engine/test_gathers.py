"""Gathers of updated parameters behind a forward pass."""

from __future__ import annotations

import torch
from torch import nn

from hvdtrain.engine.gathers import Gathers
from hvdtrain.exchange.buckets import assign_buckets, lay_out
from hvdtrain.exchange.shard_bucket import ShardBucket, Shared
from hvdtrain.spans import Spans
from tests.support.thread_comm import ThreadComm, per_rank


@per_rank(2)
def test_few_are_under_way_at_a_time(comm: ThreadComm) -> None:
    """A module waits for its own, and before for as many as have to arrive so that it starts; others start then."""
    model = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(6))
    named = list(model.named_parameters())
    layouts = lay_out(assign_buckets(named, 64 * 4), dict(named), "gradients")
    buckets = [ShardBucket(Shared(layout, comm, [True])) for layout in layouts]
    bucket_of = {bucket.layout.parameters[0]: bucket for bucket in buckets}
    gathers = Gathers(model, bucket_of, Spans(), limit_bytes=2 * buckets[0].exchange_bytes)
    for bucket in buckets:
        for owned in bucket.owned().values():
            if owned.parameter is not None:
                owned.parameter.data.fill_(7.0)
    gathers.start([bucket_of[each.weight] for each in model])  # type: ignore[index]
    assert len(comm.in_flight) == 2
    model[3](torch.zeros(8))
    assert all(bool((model[place].weight == 7).all()) for place in (0, 1, 3)) and len(comm.in_flight) == 2
    gathers.finish()
    assert all((each.weight == 7).all() for each in model) and not comm.in_flight
