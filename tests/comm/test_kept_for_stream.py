"""Results of collectives last until the stream that waits for them has used them: fake tensors of a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvdtrain.comm.torch_order import TorchHandle
from hvdtrain.exchange.buckets import assign_buckets, lay_out
from hvdtrain.exchange.shard_bucket import ShardBucket, Shared
from tests.support.thread_comm import ThreadComm, per_rank


class OnGpu(Tensor):
    """Says that it is on a GPU, and notes which streams are recorded for it."""

    recorded: list[str]
    is_cuda = True  # type: ignore[assignment]

    def record_stream(self, stream: Any) -> None:
        self.recorded.append(stream)


def _on_gpu(values: Tensor) -> OnGpu:
    found = values.as_subclass(OnGpu)
    found.recorded = []
    return found


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The current stream is the last of these."""
    current = ["main"]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    return current


def test_each_stream_that_waits_is_recorded(streams: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    horovod = pytest.importorskip("hvdtrain.comm.horovod", reason="Horovod is not built")
    result = _on_gpu(torch.ones(3))
    monkeypatch.setattr(horovod.mpi_ops, "synchronize", lambda handle: (result, torch.tensor([3])))
    handles = [horovod.HorovodHandle(1, "x", {"x": 0.0}, lambda found: found)]
    by_torch = TorchHandle("x", {}, lambda: (None, lambda: result))
    by_torch.start()
    for handle in [*handles, by_torch]:
        result.recorded.clear()
        for stream in ("side", "main"):
            streams.append(stream)
            assert handle.wait() is result
        assert result.recorded == ["side", "main"]


@per_rank(2)
def test_sums_of_a_side_stream_are_recorded_where_they_become_gradients(comm: ThreadComm) -> None:
    weight = nn.Parameter(torch.ones(600, 300))
    (layout,) = lay_out(assign_buckets([("w", weight)], 1 << 30), {"w": weight}, "gradients")
    bucket = ShardBucket(Shared(layout, comm, [False]))
    bucket.begin()
    weight.grad = torch.ones_like(weight)
    bucket.pack(0, 1.0)
    bucket.start()
    bucket.wait()
    sums = bucket._summed = _on_gpu(bucket._summed)  # type: ignore[arg-type]
    bucket.set_gradients()
    assert sums.recorded == ["main"]
