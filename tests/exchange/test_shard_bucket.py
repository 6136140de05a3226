"""Buckets of shards: on which device their tensors are, and how many are exchanged at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hvdtrain.comm.solo import Finished, SoloComm
from hvdtrain.compression.table import parse
from hvdtrain.exchange import shard_bucket
from hvdtrain.exchange.bucket_exchange import BucketQueue
from hvdtrain.exchange.buckets import assign_buckets, lay_out
from hvdtrain.exchange.coded_shard_bucket import CodedShardBucket
from hvdtrain.exchange.shard_bucket import ShardBucket, Shared
from hvdtrain.spans import Spans
from tests.support.thread_comm import ThreadComm, ThreadHandle, on_ranks


class FirstOfTwo(SoloComm):
    """Rank 0; rank 1 sends the same. Each exchange is between GPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 2

    def allgather(self, tensor: Tensor, *, name: str) -> Finished:
        assert tensor.is_meta
        return Finished(torch.cat([tensor, tensor]))

    def alltoall(self, tensor: Tensor, *, name: str, rows: object = None) -> Finished:
        assert tensor.is_meta
        return Finished(tensor)

    def reducescatter(self, tensor: Tensor, *, name: str) -> Finished:
        assert tensor.is_meta
        return Finished(tensor[:1])


@pytest.mark.parametrize("compression", ["none", "bf16"])
@pytest.mark.parametrize("on_host", [False, True])
def test_the_optimizer_is_on_the_host_and_the_exchange_is_not(
    on_host: bool, compression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device `meta` replaces a GPU: there, operations only have shapes."""
    monkeypatch.setattr(shard_bucket, "_copy_to_host", lambda tensor: torch.zeros_like(tensor, device="cpu"))
    weight = nn.Parameter(torch.empty(600, 300, device="meta"))
    (layout,) = lay_out(assign_buckets([("w", weight)], 1 << 30), {"w": weight}, "gradients")
    shared = Shared(layout, FirstOfTwo(), [False], on_host=on_host)
    if compression == "none":
        bucket = ShardBucket(shared)
    else:
        coding = parse(compression).load_coding(weight.device)
        assert coding is not None
        bucket = CodedShardBucket(shared, coding, keep_error=False)
    own = bucket.owned()["w"].parameter
    assert own is not None and own.shape[1:] == (300,) and len(own) < 600
    bucket.begin()
    weight.grad = torch.empty_like(weight)
    bucket.pack(0, 1.0)
    bucket.start()
    bucket.wait()
    (gradient,) = bucket.set_gradients()
    assert {own.device.type, gradient.device.type} == {"cpu" if on_host else "meta"} and own.grad is gradient
    bucket.start_gather()
    bucket.finish_gather()


class Slow:
    def __init__(self, handle: ThreadHandle) -> None:
        self.wait = handle.wait

    def done(self) -> bool:
        return False


def test_a_limit_holds_in_any_order_of_gradients() -> None:
    """Sums that have arrived count: many exchanges run at first, and only two at the end. Buckets start in order."""

    def body(comm: ThreadComm) -> tuple[list[int], list[str]]:
        named = [(f"p{number}", nn.Parameter(torch.zeros(64))) for number in range(8)]
        layouts = lay_out(assign_buckets(named, 64 * 4), dict(named), "gradients")
        buckets = [ShardBucket(Shared(layout, comm, [True])) for layout in layouts]
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
