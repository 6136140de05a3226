"""A queue with a limit starts buckets in order, and exchanges no more at a time than the limit allows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hvdtrain.exchange.bucket_exchange import BucketQueue
from hvdtrain.exchange.buckets import lay_out, plan
from hvdtrain.exchange.shard_bucket import ShardBucket
from hvdtrain.spans import Spans
from tests.support.thread_comm import ThreadComm, ThreadHandle, on_ranks


class Slow:
    """A collective that ends only when it is waited for."""

    def __init__(self, handle: ThreadHandle) -> None:
        self.wait = handle.wait

    def done(self) -> bool:
        return False


def test_a_limit_holds_in_any_order_of_gradients() -> None:
    """Sums that have arrived count: many exchanges run at first, and only two when all other sums are here."""

    def body(comm: ThreadComm) -> tuple[list[int], list[str]]:
        named = [(f"p{number}", nn.Parameter(torch.zeros(64))) for number in range(8)]
        layouts = lay_out(plan(named, 64 * 4), dict(named), "gradients")
        buckets = [ShardBucket(layout, comm, [True]) for layout in layouts]
        limit = sum(bucket.segment_bytes for bucket in buckets) + 2 * comm.size * buckets[0].segment_bytes
        queue = BucketQueue(buckets, 1.0, Spans(), limit)
        started: list[str] = []
        running: list[int] = []
        inner = comm.reducescatter

        def scatter(tensor: Tensor, *, name: str) -> Slow:
            started.append(name)
            handle = Slow(inner(tensor, name=name))
            running.append(len(comm.in_flight))
            assert running[-1] * buckets[0].exchange_bytes + sum(bucket.kept_bytes for bucket in buckets) <= limit
            return handle

        comm.reducescatter = scatter  # type: ignore[method-assign, assignment]
        queue.begin()
        order = list(range(8)) if comm.rank == 0 else [1, 0, 3, 2, 5, 7, 6, 4]
        for bucket in buckets:
            bucket.layout.parameters[0].grad = torch.ones(64)
        for number in order:
            queue.add_gradient(buckets[number].layout.shape.parts[0].name)
        queue.finish()
        return running, started

    for running, started in on_ranks(2, body):
        assert started == [f"gradients/{number}" for number in range(8)]
        assert max(running) == 4 and running[-1] == 2, running
