"""A model of blocks that takes milliseconds, with what is hard to divide among ranks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from hvdtrain import Task
from tests.support.failing import rank

STACK = (
    f"--task={Path(__file__)}:stack",
    "--train.steps=6",
    "--train.micro_batch=2",
    "--train.eval_samples=5",
    "--train.global_batch=8",
    "--checkpoint.every=0",
)
BACK = ("--bad=true", "--elastic.roll_back=non_finite", "--train.max_skipped=1")
VARIANTS = {
    "even": (),
    "uneven": ("--train.global_batch=10", "--checkpoints=true", "--unequal=true"),
    "idle": ("--train.global_batch=2", "--statistics=true", "--train.clip=0"),
    "back": (*BACK, "--method=momentum"),
    "adagrad": ("--method=adagrad", "--again=true"),
    "scaled": ("--method=adamw", "--precision=fp16"),
    "rounded": ("--method=momentum", "--precision=bf16"),
    "remade": ("--method=momentum", "--remade=true"),
}
"""Options of trainings, in which ranks have equally many micro-batches, one fewer, or none."""
STATISTICS = ("--train.global_batch=10", "--statistics=true")
"""Options of one with running statistics, which depend on the number of ranks."""

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.1),
}


class Block(nn.Module):
    """A dropout, a parameter of one row, five rows, and one that only some batches use."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 5)
        self.outer = nn.Linear(5, width)
        self.scale = nn.Parameter(torch.ones(1))
        self.sometimes = nn.Parameter(torch.ones(width))
        self.never = nn.Parameter(torch.ones(3))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, odd: bool) -> Tensor:
        h = self.outer(self.dropout(torch.tanh(self.inner(x)))) * self.scale
        return x + (h * self.sometimes if odd else h)


class Stack(nn.Module):
    """Blocks between an embedding and a tied head; a frozen layer."""

    def __init__(self, checkpoints: bool, statistics: bool, dropout: float, again: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.layers = nn.ModuleList(Block(8, dropout) for _ in range(3))
        self.norm = nn.BatchNorm1d(6) if statistics else nn.LayerNorm(8)
        self.head = nn.Linear(8, 30, bias=False)
        self.head.weight = self.embedding.weight
        self._checkpoints = checkpoints
        self._times = 2 if again else 1

    def forward(self, tokens: Tensor) -> Tensor:
        odd = bool(tokens.sum() % 2)
        x = self.frozen(self.embedding(tokens))
        for layer in [*self.layers] * self._times:
            x = checkpoint(layer, x, odd, use_reentrant=False) if self._checkpoints else layer(x, odd)
        return self.head(self.norm(x))


def stack(
    method: str = "sgd",
    checkpoints: bool = False,
    statistics: bool = False,
    bad: bool = False,
    dropout: float = 0.1,
    unequal: bool = False,
    again: bool = False,
    wanders: bool = False,
    remade: bool = False,
) -> Task:
    """Predict the next token of random ones.

    Args:
        method: one of `OPTIMIZERS`
        checkpoints: whether backward computes the activations of blocks again
        statistics: whether the model has running statistics, for batches of 6 tokens
        bad: whether the loss of one training sample is not a number
        dropout: share of each block that is dropped
        unequal: whether ranks begin with other parameters than rank 0, by mistake; rank 1 also reads them
        again: whether a pass runs the blocks twice
        wanders: whether rank 3 changes rows of a parameter in its fourth training pass
        remade: whether a block and a weight are frozen, too, and checkpoints leave out what is frozen
    """
    torch.manual_seed(3)
    model = Stack(checkpoints, statistics, dropout, again)
    if remade:
        model.layers[1].requires_grad_(False)
        model.layers[0].inner.weight.requires_grad_(False)  # type: ignore[union-attr]
    data = torch.randint(0, 29, (40, 7))
    data[5, 0] = 29
    if unequal and rank():
        for parameter in model.parameters():
            parameter.data.add_(1.0)
            if rank() == 1:
                float(parameter.sum())

    passes = count(1)

    def loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
        if wanders and rank() == 3 and model.training and next(passes) == 4:
            dict(model.named_parameters())["layers.0.inner.weight"].to_local().data.add_(1e-3)  # type: ignore[attr-defined]
        logits = model(batch[0][:, :-1])
        total = nn.functional.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten(), reduction="sum")
        is_bad = bad and bool((batch[0] == 29).any())
        return total * (float("nan") if is_bad else 1.0), 6 * len(logits)

    train, heldout = torch.utils.data.TensorDataset(data[:33]), torch.utils.data.TensorDataset(data[33:])
    chosen = OPTIMIZERS[method]([p for p in model.parameters() if p.requires_grad])
    return Task(model, loss, train, heldout, optimizer=chosen, nominal_weight=6, remakes_frozen=remade)


def wide() -> Task:
    """Four blocks of 1 MiB each."""
    torch.manual_seed(3)
    model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(4)])
    data = torch.utils.data.TensorDataset(torch.randn(32, 512))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Task(model, lambda model, batch: (model(batch[0]).square().sum(), len(batch[0])), data, optimizer=optimizer)
