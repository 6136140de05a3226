"""What the FSDP engines do and when: rank 0 of 4; torch's fake backend and `Recording` replace the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from hvdtrain.comm.solo import Finished, SoloComm
from hvdtrain.engine import fsdp_layout
from hvdtrain.engine.base import Engine
from hvdtrain.engine.make import make_engine
from hvdtrain.errors import TaskError
from hvdtrain.plan.plan import Plan


class Recording(SoloComm):
    """Records the names of the sums that begin; other ranks have zeros."""

    def __init__(self, size: int, begun: list[str]) -> None:
        super().__init__()
        self.size, self.local_size, self._begun = size, size, begun

    def allreduce(self, tensor: Tensor, *, name: str) -> Finished:
        self._begun.append(name)
        return Finished(tensor)

    def allgather(self, tensor: Tensor, *, name: str) -> Finished:
        return Finished(torch.cat([tensor] * self.size))

    def reducescatter(self, tensor: Tensor, *, name: str) -> Finished:
        self._begun.append(name)
        return Finished(tensor.tensor_split(self.size)[0].clone())

    def subset(self, ranks: Sequence[int], local_rank: int, local_size: int) -> Recording:
        return Recording(len(ranks), self._begun)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the sums, in the order in which they begin, and of the blocks whose backward pass has begun."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    monkeypatch.setattr(fsdp_layout, "lasting_group", lambda comm, ranks: dist.new_group(list(ranks)))
    yield []
    dist.destroy_process_group()


class Block(nn.Linear):
    def __init__(self, name: str, begun: list[str]) -> None:
        super().__init__(4, 4, bias=False)
        self._name, self._begun = name, begun
        self.seen: set[torch.dtype] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.seen |= {x.dtype, self.weight.dtype}
        out = super().forward(x)
        out.register_hook(lambda _: self._begun.append(self._name))
        return out


class Model(nn.Module):
    def __init__(self, times: int, begun: list[str], *, checkpoints: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(str(number), begun) for number in range(3))
        self._times, self._checkpoints = times, checkpoints

    def forward(self, x: Tensor) -> Tensor:
        for block in [*self.blocks] * self._times:
            x = checkpoint(block, x, use_reentrant=False) if self._checkpoints else block(x)
        return x.sum()


def _make(model: Model, begun: list[str], **options: Any) -> Engine:
    optimizer = torch.optim.SGD(model.blocks.parameters(), lr=0.1)
    return make_engine(optimizer, model, Recording(4, begun), Plan("fsdp", shard="parameters", **options))


def _pass(engine: Engine, model: Model) -> Tensor:
    loss, _ = engine.forward(lambda: (model(torch.ones(2, 4)), 1))
    engine.backward(loss)
    return loss


def _passes(begun: list[str], times: int, *, checkpoints: bool = False, **options: Any) -> list[list[str]]:
    """What each of two backward passes of a step begins, and then its end. Each pass runs the blocks `times` times."""
    model = Model(times, begun, checkpoints=checkpoints)
    engine = _make(model, begun, **options)
    found = []
    engine.begin(2)
    for _ in range(2):
        begun.clear()
        _pass(engine, model)
        found.append(begun.copy())
    begun.clear()
    engine.finish()
    return [*found, begun.copy()]


EACH = ["2", "gradients/blocks.2", "1", "gradients/blocks.1", "0", "gradients/blocks.0"]
"""A pass: the sum of a block's gradients begins before the next block has any."""


def test_gradients_are_summed_in_each_pass(begun: list[str]) -> None:
    assert _passes(begun, 1) == [EACH, EACH, []]


@pytest.mark.parametrize("checkpoints", [False, True])
def test_groups_exchange_in_the_last_pass_while_backward_runs(checkpoints: bool, begun: list[str]) -> None:
    last = [*EACH]
    last[3:3] = ["replicas/0"]
    last[6:6] = ["replicas/1"]
    assert _passes(begun, 1, checkpoints=checkpoints, dp_shard=2, bucket_mib=1e-5) == [EACH, last, ["replicas/2"]]


def test_groups_exchange_the_gradients_of_blocks_that_ran_twice_after_backward(begun: list[str]) -> None:
    *passes, end = _passes(begun, 2, dp_shard=2, bucket_mib=1e-5)
    assert passes == [EACH * 2, EACH * 2] and sorted(end) == ["replicas/0", "replicas/1", "replicas/2"]


@pytest.mark.parametrize("change", ["freeze", "add"])
def test_parameters_stay_the_same_during_training(change: str, begun: list[str]) -> None:
    model = Model(1, begun)
    engine = _make(model, begun)
    engine.begin(1)
    _pass(engine, model)
    engine.finish()
    if change == "freeze":
        model.blocks[0].requires_grad_(False)
    else:
        engine.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(TaskError, match="parameters were added, frozen or freed"):
        engine.begin(1)


def test_blocks_compute_with_bf16_copies_of_fp32_weights(begun: list[str]) -> None:
    model = Model(1, begun)
    engine = _make(model, begun, precision="bf16-weights")
    engine.begin(1)
    loss = _pass(engine, model)
    assert loss.dtype == torch.float32 and all(block.seen == {torch.bfloat16} for block in model.blocks)
    assert {gradient.dtype for gradient in engine.finish()} == {torch.float32}
    assert {p.dtype for group in engine.optimizer.param_groups for p in group["params"]} == {torch.float32}


def test_rows_are_on_the_host_if_the_optimizer_is(begun: list[str]) -> None:
    for offload in (False, True):
        _make(model := Model(1, begun), begun, offload=offload)
        groups = [module._get_fsdp_state()._fsdp_param_group for module in model.blocks]  # type: ignore[operator, union-attr]
        assert [group.offload_to_cpu for part in groups for group in part.fsdp_params] == [offload] * 3
