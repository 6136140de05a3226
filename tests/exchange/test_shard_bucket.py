"""Where the tensors of a bucket of shards are. The device `meta` replaces a GPU: there, operations only have shapes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hvdtrain.comm.solo import Finished, SoloComm
from hvdtrain.compression.table import parse
from hvdtrain.exchange import shard_bucket
from hvdtrain.exchange.buckets import lay_out, plan
from hvdtrain.exchange.coded_shard_bucket import CodedShardBucket
from hvdtrain.exchange.shard_bucket import ShardBucket


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
    monkeypatch.setattr(shard_bucket, "_copy_to_host", lambda tensor: torch.zeros_like(tensor, device="cpu"))
    weight = nn.Parameter(torch.empty(600, 300, device="meta"))
    (layout,) = lay_out(plan([("w", weight)], 1 << 30), {"w": weight}, "gradients")
    if compression == "none":
        bucket = ShardBucket(layout, FirstOfTwo(), [False], on_host=on_host)
    else:
        coding = parse(compression).load_coding(weight.device)
        assert coding is not None
        bucket = CodedShardBucket(layout, FirstOfTwo(), [False], coding, keep_error=False, on_host=on_host)
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
