"""Gradients summed over ranks: against float64, with ranks and parameters that idle. (Law 6: test_drop_in.py.)"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hvdtrain.comm.base import Comm
from hvdtrain.comm.dimensions import Dimensions
from hvdtrain.engine.base import Engine
from hvdtrain.engine.make import make_engine
from hvdtrain.errors import ConfigError
from hvdtrain.plan.plan import Plan
from hvdtrain.state.divided import local
from tests.support.divided_models import divided
from tests.support.toy import Net


def _model() -> Net:
    torch.manual_seed(3)
    return Net(16, 0.0)


def _batch(rank: int, index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + index)
    return torch.randn(4, 6, generator=generator), torch.randn(4, generator=generator)


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return ((model(batch[0]) - batch[1]) ** 2).sum()


def _exchange(engine: Engine, model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    engine.begin(len(batches))
    for batch in batches:
        engine.backward(engine.forward(lambda batch=batch: (_loss(model, batch), 4.0))[0])
    engine.finish()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def _reference(counts: list[int]) -> list[Tensor]:
    model = _model().double()
    for rank, count in enumerate(counts):
        for index in range(count):
            x, y = _batch(rank, index)
            _loss(model, (x.double(), y.double())).backward()
    return [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]


@pytest.mark.parametrize("name", ["horovod", "ddp"])
@pytest.mark.parametrize(
    "passes", [lambda r: 1, lambda r: 1 + 2 * (r % 2), lambda r: int(r == 0)], ids=["1", "1, 3", "1, 0"]
)
def test_law_5_sums_equal_float64(job: Comm, passes: Callable[[int], int], name: str) -> None:
    """Also where ranks have unequal numbers of micro-batches, or none; the idle layer counts as zero."""
    counts = [passes(rank) for rank in range(job.size)]
    model = _model()
    engine = make_engine(torch.optim.SGD(model.parameters(), lr=0.1), model, job, Plan(name))
    mine = [_batch(job.rank, index) for index in range(counts[job.rank])]
    for _ in range(2):
        for found, expected in zip(_exchange(engine, model, mine), _reference(counts), strict=True):
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")
@pytest.mark.parametrize(
    ("name", "shard"), [("horovod", "none"), ("horovod", "gradients"), ("ddp", "none"), ("fsdp", "parameters")]
)
def test_what_no_rank_uses_keeps_its_value(job: Comm, name: str, shard: str, several_ranks: None) -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    before = model.idle.weight.detach().clone()
    engine = make_engine(optimizer, model, job, Plan(name, shard=shard))
    engine.begin(1)
    engine.backward(engine.forward(lambda: (_loss(model, _batch(job.rank, 0)), 1.0))[0])
    unused = engine.unused()
    engine.finish()
    engine.leave_out([number for number, each in enumerate(unused) if each])
    engine.step()
    engine.complete()
    after = model.idle.weight.detach()
    assert torch.equal(after.full_tensor() if isinstance(after, DTensor) else after, before)


@pytest.mark.parametrize("shard", ["none", "optimizer"])
@pytest.mark.parametrize("dimension", ["tp", "ep"])
def test_what_no_rank_of_a_mesh_uses_keeps_its_value(
    job: Comm, dimension: str, shard: str, several_ranks: None
) -> None:
    torch.manual_seed(0)
    task = divided()
    task.model.idle = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=0.1, weight_decay=0.5)
    plan = Plan(shard=shard, dimensions=Dimensions(**{dimension: 2}))
    if shard == "optimizer" and dimension == "tp":
        with pytest.raises(ConfigError, match="hold one of each"):
            make_engine(optimizer, task.model, job, plan)
        return
    engine = make_engine(optimizer, task.model, job, plan)
    before = {name: p.detach().clone() for name, p in task.model.named_parameters() if p.dim() == 2}
    engine.begin(1)
    engine.backward(engine.forward(lambda: task.loss(task.model, task.train_data[job.rank][None]))[0])
    unused = engine.unused()
    assert sum(unused) == 2
    engine.finish()
    engine.leave_out([number for number, each in enumerate(unused) if each])
    engine.step()
    engine.complete()
    after = dict(task.model.named_parameters())
    assert [name for name in before if torch.equal(local(after[name]), local(before[name]))] == ["idle.weight"]


@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_bfloat16_gradients_do_not_overflow(job: Comm, compression: str) -> None:
    """1e6 is past fp16's range and inside bfloat16's; Horovod itself sums no bfloat16."""
    model = nn.Linear(4, 1, bias=False).bfloat16()
    engine = make_engine(torch.optim.SGD(model.parameters(), lr=0.1), model, job, Plan(compression=compression))
    engine.begin(1)
    engine.backward(model(torch.full((1, 4), 1e6, dtype=torch.bfloat16)).sum())
    engine.finish()
    gradient = model.weight.grad
    assert gradient is not None
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(gradient.float(), torch.full((1, 4), 1e6 * job.size), rtol=1e-2, atol=0)


@pytest.mark.parametrize("compression", ["none", "fp16"])
@pytest.mark.parametrize("name", ["horovod", "ddp"])
def test_complex_gradients_keep_both_parts(job: Comm, name: str, compression: str) -> None:
    model = nn.Linear(4, 1, bias=False, dtype=torch.complex64)
    engine = make_engine(torch.optim.SGD(model.parameters(), lr=0.1), model, job, Plan(name, compression))
    for _ in range(2):
        engine.begin(1)
        x = torch.full((1, 4), 1 + 2j * (job.rank + 1), dtype=torch.complex64)
        engine.backward(engine.forward(lambda x=x: (model(x).real.sum(), 1.0))[0])
        engine.finish()
        expected = sum(1 - 2j * (rank + 1) for rank in range(job.size))
        torch.testing.assert_close(model.weight.grad, torch.full((1, 4), expected, dtype=torch.complex64))
