"""Stages that FSDP divides among the ranks with copies of them. (Training: the laws.)"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvdtrain import Task
from hvdtrain.comm.dimensions import Dimensions
from hvdtrain.comm.solo import ImaginedComm, imagined_ranks
from hvdtrain.engine.make import make_engine
from hvdtrain.engine.schedule import with_stages
from hvdtrain.errors import ConfigError, TaskError
from hvdtrain.plan.plan import Plan

PP2 = Dimensions(pp=2)


class Scaled(nn.Module):
    """A module with parameters of its own and in a child."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.ones(outputs)), nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale  # type: ignore[no-any-return]


class Model(nn.Module):
    """Embeddings, blocks, a module that not each pass runs, and a head."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(5, 4), nn.Embedding(3, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(blocks))
        self.rare, self.head = nn.Linear(4, 4), Scaled(4, 5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(len(ids)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.rare(x) if ids[0] else x)  # type: ignore[no-any-return]


def _loss(model: nn.Module, ids: Tensor) -> tuple[Tensor, float]:
    return model(ids).sum(), 1.0


@contextmanager
def _engine(rank: int, model: nn.Module, size: int = 4, **dimensions: Any) -> Iterator[Any]:
    comm, optimizer = ImaginedComm(size, rank=rank), torch.optim.SGD(model.parameters())
    plan = Plan("fsdp", shard="parameters", dimensions=replace(PP2, **dimensions))
    with imagined_ranks(size, rank):
        engine = make_engine(optimizer, model, comm, plan)
        try:
            yield engine
        finally:
            engine.close()


def test_ranks_have_all_rows_together() -> None:
    """Each of a stage has its rows of that, and nothing of the other one."""
    whole = {name: parameter.numel() for name, parameter in Model().named_parameters()}
    found = dict.fromkeys(whole, 0)
    for rank in range(4):
        model = Model()
        with _engine(rank, model) as engine:
            held = {name: own.parameter for name, own in engine.owned().items() if own.parameter is not None}
            first = {name for name in whole if name.startswith(("tokens", "places", "blocks.0"))}
            assert held.keys() == (first if rank < 2 else whole.keys() - first)
            for name, rows in held.items():
                found[name] += rows.numel()
            assert sum(map(len, (group["params"] for group in engine.optimizer.param_groups))) == len(held)
    assert found == whole


@pytest.mark.parametrize(("rank", "runs", "missing"), [(0, 1, ""), (2, 1, ""), (2, 0, "rare")])
def test_a_pass_runs_what_all_copies_gather(rank: int, runs: int, missing: str) -> None:
    """In a step; evaluations sum no gradients."""
    model: Any = Model()
    with _engine(rank, model) as engine:
        task = with_stages(Task(model, _loss, []), engine.schedule.stage)
        engine.schedule.stage._unchecked = set()
        engine.begin(2)

        def forward() -> None:
            engine.forward(lambda: task.loss(model, torch.tensor([runs, 2])))

        with torch.no_grad():
            task.loss(model, torch.tensor([runs, 2]))
        if missing:
            with pytest.raises(TaskError, match=f"a pass has not run {missing}\n"):
                forward()
        else:
            forward()
            forward()


def _changed(change: Callable[[Any], object]) -> nn.Module:
    model = Model()
    change(model)
    return model


@pytest.mark.parametrize(
    ("build", "size", "dimensions", "said"),
    [
        (lambda: _changed(lambda m: setattr(m.head, "weight", m.tokens.weight)), 4, {}, "tokens.weight"),
        (lambda: _changed(lambda m: setattr(m, "own", nn.Parameter(torch.ones(1)))), 4, {}, "own, a parameter of"),
        (lambda: _changed(lambda m: setattr(m, "takes_embeddings", True)), 4, {}, "tokens.weight"),
        (Model, 2, {}, "divides parts among the ranks with copies of them"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    build: Callable[[], nn.Module], size: int, dimensions: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said), _engine(0, build(), size, **dimensions):
        pass
