"""A model that is not the same on all ranks is named at the start, whatever differs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from hvdtrain.engine.make import check_same, make_engine
from hvdtrain.errors import LaunchError
from hvdtrain.plan.plan import Plan
from tests.support.thread_comm import ThreadComm, per_rank

Made = tuple[nn.Module, Optimizer]


class Net(nn.Module):
    def __init__(self, width: int = 4, *, turned: bool = False, table: int = 3) -> None:
        super().__init__()
        for name in ("b", "a") if turned else ("a", "b"):
            setattr(self, name, nn.Linear(4, width if name == "a" else 4))
        self.register_buffer("table", torch.zeros(table))


def _made(model: nn.Module, kind: Callable[..., Optimizer] = AdamW, **options: object) -> Made:
    return model, kind(model.parameters(), **options)


def _frozen() -> Made:
    model = Net()
    model.a.bias.requires_grad_(False)
    return _made(model)


def _groups(count: int) -> Made:
    model = Net()
    parameters = list(model.parameters())
    return model, AdamW([{"params": parameters[:count]}, {"params": parameters[count:]}])


def _with_option() -> Made:
    model, optimizer = _made(Net())
    optimizer.param_groups[0]["scale"] = 2.0
    return model, optimizer


DIFFERENT: dict[str, tuple[Callable[[], Made], str]] = {
    "shape": (lambda: _made(Net(width=5)), "a.weight"),
    "dtype": (lambda: _made(Net().double()), "a.weight"),
    "name": (lambda: _made(nn.Sequential(Net())), "a.weight"),
    "order": (lambda: _made(Net(turned=True)), "the order of the model's parameters"),
    "what is trained": (_frozen, "a.bias"),
    "buffer": (lambda: _made(Net(table=2)), "table"),
    "optimizer": (lambda: _made(Net(), Adam), "the optimizer differs"),
    "momentum": (lambda: _made(Net(), SGD, lr=0.1), "the optimizer differs"),
    "groups": (lambda: _groups(1), "group 0"),
    "option": (_with_option, "the set of options in the optimizer's group 0"),
}


@pytest.mark.parametrize("how", DIFFERENT)
@pytest.mark.parametrize("odd", [0, 1, 2])
@per_rank(3)
def test_every_rank_reports_what_differs_and_where(comm: ThreadComm, how: str, odd: int) -> None:
    make, said = DIFFERENT[how]
    model, optimizer = make() if comm.rank == odd else _made(Net())
    with pytest.raises(LaunchError, match=f"rank {odd or 1} is not that of rank 0") as caught:
        make_engine(optimizer, model, comm, Plan())
    assert caught.value.everywhere
    assert said in str(caught.value) or odd == 0


@per_rank(3)
def test_what_is_the_same_passes_and_learning_rates_and_order_in_a_group_may_differ(comm: ThreadComm) -> None:
    model = Net()
    parameters = list(model.parameters())
    check_same(model, AdamW(parameters[:: 1 - 2 * (comm.rank == 1)], lr=0.1 * (1 + comm.rank)), comm)
