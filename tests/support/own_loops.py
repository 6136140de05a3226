"""Loops of users, on threads, with a whole and a divided optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.compression.table import parse
from hvdtrain.engine.own_optimizer import divide_optimizer
from hvdtrain.exchange.optimizer import exchanging
from hvdtrain.exchange.own_loop import Exchange
from hvdtrain.exchange.reducer import Reducer
from tests.support.thread_comm import ThreadComm

STEPS = 5


class Model(nn.Module):
    """Tensors that are divided by rows, tied, unused, and without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(400, 256)
        nn.init.normal_(self.embedding.weight, 0.0, 0.05)
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(2))
        self.images = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.head = nn.Linear(256, 400, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Linear(7, 7)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x) * self.scale
        h = h + self.images(h[:, :3, :9].unsqueeze(3).expand(-1, -1, -1, 9)).mean()
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        result: Tensor = self.head(h)
        return result


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    x = torch.randint(0, 400, (4, 6), generator=torch.Generator().manual_seed(1000 * rank + step))
    return nn.functional.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


def distribute(
    comm: ThreadComm,
    model: nn.Module,
    optimizer: Optimizer,
    shard: str,
    compression: str = "none",
    *,
    passes: int = 1,
    weight: float | None = None,
    factor: float = 1.0,
) -> Any:
    """What `DistributedOptimizer` does, on threads."""
    weight = 1 / comm.size if weight is None else weight
    how: dict[str, Any] = {"weight": weight, "factor": factor, "passes": passes}
    named = [
        (n, p) for n, p in model.named_parameters() if any(p is q for g in optimizer.param_groups for q in g["params"])
    ]
    if shard == "none":
        trained = lambda: [(n, p) for n, p in named if p.requires_grad]  # noqa: E731
        reducer = Reducer(trained, comm, parse(compression), as_views=False, **how)
        return exchanging(optimizer, Exchange(reducer, lambda: (comm, weight, factor), lambda: 0))
    how |= {"shard": shard, "variables": {}, "name": "gradients"}
    return exchanging(optimizer, divide_optimizer(optimizer, named, comm, compression, lambda: 0, **how))


def make(comm: ThreadComm, shard: str, kind: str = "adamw", compression: str = "none", **options: Any) -> Any:
    model = Model()
    return model, distribute(comm, model, OPTIMIZERS[kind](model.parameters()), shard, compression, **options)


def train(comm: ThreadComm, model: nn.Module, optimizer: Any, steps: Iterable[int] = range(STEPS)) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, comm.rank, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


Result = tuple[list[float], dict[str, Tensor], Any]
Loop = Callable[[ThreadComm, str], Result]


def result(losses: list[float], model: nn.Module, optimizer: Any) -> Result:
    return losses, copy.deepcopy(model.state_dict()), optimizer.gather_state_dict()


def plain(comm: ThreadComm, shard: str, kind: str = "adamw", **options: Any) -> Result:
    model, optimizer = make(comm, shard, kind, **options)
    return result(train(comm, model, optimizer), model, optimizer)


def clipping(comm: ThreadComm, shard: str) -> Result:
    model, optimizer = make(comm, shard, "momentum")
    losses = []
    for step in range(STEPS):
        model.zero_grad()
        loss = loss_of(model, comm.rank, step)
        loss.backward()
        losses += [loss.item(), optimizer.clip_grad_norm_(0.1).item()]
        optimizer.step()
    assert min(losses) > 0.1
    return result(losses, model, optimizer)


def synchronized(comm: ThreadComm, shard: str) -> Result:
    """The stock pattern, with our way to clip."""
    model, optimizer = make(comm, shard, "adamw")
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, comm.rank, step)
        optimizer.zero_grad(set_to_none=bool(step % 2))
        loss.backward()
        optimizer.synchronize()
        losses += [loss.item(), optimizer.clip_grad_norm_(0.1).item()]
        with optimizer.skip_synchronize():
            optimizer.step()
    return result(losses, model, optimizer)


def groups_and_schedules(comm: ThreadComm, shard: str) -> Result:
    model = Model()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": others, "lr": 0.05}, {"params": decayed, "weight_decay": 0.1}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    optimizer = distribute(comm, model, optimizer, shard)
    losses = []
    for step in range(STEPS):
        losses += train(comm, model, optimizer, [step])
        schedule.step()
        losses += [optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"]]
    return result(losses, model, optimizer)


def accumulation(comm: ThreadComm, shard: str) -> Result:
    """With idle ranks, and a number of passes that changes."""
    model, optimizer = make(comm, shard, "momentum", passes=3)
    losses = []
    for step in range(STEPS):
        passes = 3 if step < 3 else 2
        optimizer.set_backward_passes_per_step(passes)
        optimizer.zero_grad()
        for part in range(passes if comm.rank or step != 1 else 1):
            loss = loss_of(model, comm.rank, 3 * step + part)
            (loss / 3).backward()
            losses.append(loss.item())
        optimizer.step()
    return result(losses, model, optimizer)


def sum_of_gradients(comm: ThreadComm, shard: str) -> Result:
    return plain(comm, shard, "momentum", weight=0.25, factor=3.0)


def closures(comm: ThreadComm, shard: str) -> Result:
    model, optimizer = make(comm, shard, "adamw")

    def closure(step: int) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, comm.rank, step)
        loss.backward()
        return loss

    losses = [optimizer.step(lambda step=step: closure(step)).item() for step in range(STEPS)]
    return result(losses, model, optimizer)


def frozen_and_freed(comm: ThreadComm, shard: str) -> Result:
    model, optimizer = make(comm, shard, "momentum")
    losses = []
    for step in range(STEPS):
        model.layers[0].requires_grad_(step >= 2)
        model.layers[1].requires_grad_(step < 4)
        losses += train(comm, model, optimizer, [step])
    return result(losses, model, optimizer)


def left_out(comm: ThreadComm, shard: str) -> Result:
    """A step that sums gradients and does not use them, and an idle rank."""
    model, optimizer = make(comm, shard, "adamw")
    losses = []
    for step in range(STEPS):
        model.zero_grad()
        if step != 3 or comm.rank == 0:
            loss = loss_of(model, comm.rank, step)
            loss.backward()
            losses.append(loss.item())
        if step != 2:
            optimizer.synchronize()
        if step != 1:
            with optimizer.skip_synchronize() if step != 2 else nullcontext():
                optimizer.step()
    return result(losses, model, optimizer)


def changed_parameters(comm: ThreadComm, shard: str, compression: str = "none") -> Result:
    """A program writes to the model's parameters, in ways that autograd's versions show and do not show."""
    model, optimizer = make(comm, shard, "momentum", compression)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            torch.nn.init.normal_(parameter.data, 0.0, 0.02, generator=torch.Generator().manual_seed(number))
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, comm.rank, step)
        loss.backward()
        if step == 2:
            model.embedding.weight.data.mul_(0.5)
        optimizer.step()
        if step == 3:
            with torch.no_grad():
                model.layers[1].weight.clamp_(-0.02, 0.02)
        losses.append(loss.item())
    return result(losses, model, optimizer)


LOOPS: list[Loop] = [
    clipping,
    synchronized,
    groups_and_schedules,
    accumulation,
    sum_of_gradients,
    closures,
    frozen_and_freed,
    left_out,
    changed_parameters,
]


def same_state(found: Any, expected: Any) -> None:
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for number, slots in expected["state"].items():
        assert found["state"][number].keys() == slots.keys()
        for slot, value in slots.items():
            other = torch.as_tensor(found["state"][number][slot])
            assert torch.equal(other, torch.as_tensor(value)), (number, slot)
            assert other.stride() == torch.as_tensor(value).stride(), (number, slot)
