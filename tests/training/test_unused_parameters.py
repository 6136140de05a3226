"""Parameters that no rank uses in a step keep their values, as in plain torch, for any engine that knows them."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hvdtrain.engine.make import make_engine
from hvdtrain.exchange.residuals import residual_key
from hvdtrain.plan.plan import Plan
from hvdtrain.spans import Spans
from hvdtrain.task.base import Task
from hvdtrain.training.loop.forward import Precision
from hvdtrain.training.loop.step import Stepper
from hvdtrain.training.loop.update import count_users, used_by_nobody
from tests.support.thread_comm import ThreadComm, on_ranks

CPU = torch.device("cpu")
USES = [[], ["one"], [], ["one", "two"], []]
"""Layers that a step uses besides the first one: only by the last micro-batch but one."""


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.always, self.one, self.two, self.never = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor, names: list[str]) -> Tensor:
        out: Tensor = self.always(x)
        for name in names:
            out = out + getattr(self, name)(x)
        return out


def _loss(model: nn.Module, batch: tuple[Tensor, list[str]]) -> tuple[Tensor, int]:
    return (model(*batch) ** 2).sum(), len(batch[0])


def _batches(step: int) -> list[tuple[Tensor, list[str]]]:
    x = torch.randn(4, 2, 4, generator=torch.Generator().manual_seed(step))
    return [(each, USES[step] if number == 2 else []) for number, each in enumerate(x)]


def _optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1, fused=kind == "fused")


def _plain(kind: str) -> dict[str, Tensor]:
    model = Layers()
    optimizer = _optimizer(kind, model)
    for step in range(len(USES)):
        optimizer.zero_grad()
        (sum(_loss(model, batch)[0] for batch in _batches(step)) / 8).backward()  # type: ignore[union-attr]
        optimizer.step()
    return {name: value.detach() for name, value in model.named_parameters()}


def _train(comm: ThreadComm, kind: str, first: dict[str, Tensor] | None = None, **options: Any) -> dict[str, Tensor]:
    model = Layers()
    compression = options.pop("compression", "none")
    by_device = options.pop("by_device", False)
    engine = make_engine(_optimizer(kind, model), model, comm, Plan(compression=compression, **options), Spans())
    if first:
        engine.load_state_dict(first, {"plan": None, "ranks": comm.size})
    task = Task(model, _loss, cast(Any, []))
    stepper = Stepper(task, model, engine, comm, Precision("fp32", CPU), CPU, 8, 0.0, Spans(), by_device=by_device)
    for step in range(len(USES)):
        own = [(lambda: None, batch) for batch in _batches(step)[comm.rank :: comm.size]]
        assert stepper.run(own, len(own), [comm.rank, 7]).sums == [sum(range(comm.size)), 7 * comm.size]
    engine.complete()
    return {name: value.detach().clone() for name, value in model.named_parameters()}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("adamw", {}),
        ("sgd", {}),
        ("fused", {"by_device": True}),
        ("sgd", {"shard": "optimizer"}),
        ("adamw", {"shard": "gradients"}),
    ],
    ids=str,
)
def test_they_train_as_in_plain_torch(kind: str, options: dict[str, Any], size: int) -> None:
    expected = _plain("sgd" if kind == "fused" else kind)  # fused, plain torch cannot begin with momentum later
    if size == 1 and "shard" in options:
        pytest.skip("nothing to divide")
    for found in on_ranks(size, lambda comm: _train(comm, kind, **options)):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("options", [{}, {"shard": "optimizer"}], ids=str)
def test_with_error_feedback_they_change_only_by_a_residual(options: dict[str, Any]) -> None:
    before = {name: value.detach() for name, value in Layers().named_parameters()}
    residual = {residual_key("never.weight"): torch.ones(4, 4)}
    results = on_ranks(2, lambda comm: _train(comm, "sgd", residual, compression="int8", **options))
    for found in results:
        assert torch.equal(found["never.bias"], before["never.bias"])
        assert not torch.equal(found["never.weight"], before["never.weight"])
        assert all(torch.equal(found[name], results[0][name]) for name in found)


@given(st.integers(1, 3000), st.data())
def test_counts_over_any_number_of_ranks(ranks: int, data: st.DataObject) -> None:
    """A sum in float64 over all ranks, as a step makes it."""
    length = data.draw(st.integers(0, 60))
    several = [data.draw(st.lists(st.booleans(), min_size=length, max_size=length)) for _ in range(min(ranks, 3))]
    unused = several + [several[-1]] * (ranks - len(several))
    sums = torch.tensor([count_users(tuple(each), ranks) for each in unused], dtype=torch.float64).sum(0).tolist()
    expected = [number for number in range(length) if all(each[number] for each in several)]
    assert used_by_nobody([round(each) for each in sums], unused[0], ranks) == expected
