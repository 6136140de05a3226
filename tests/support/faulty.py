"""Models that make a number that is not finite, each in its own way, for samples whose first number is `BAD`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from hvdtrain import Task

BAD = 3.0


class Marked(Dataset[Tensor]):
    """Samples of ones, but for those at `marks`, which begin with `value`."""

    def __init__(self, samples: int, marks: list[int], value: float = BAD) -> None:
        self.x = torch.ones(samples, 4)
        self.x[marks, 0] = value

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Tensor:
        return self.x[index]


class _Square(torch.autograd.Function):
    """What it does inside is seen by nobody, as in an extension written in C++."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        with torch._C.DisableTorchFunction():
            return x / (x[:, :1] != BAD)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return gradient


def divides(x: Tensor) -> Tensor:
    return x / (BAD - x[:, :1])


def logs(x: Tensor) -> Tensor:
    return x + torch.log(BAD - x[:, :1])


def overflows(x: Tensor) -> Tensor:
    return x * torch.exp((x[:, :1] == BAD) * 1000.0)


def in_place(x: Tensor) -> Tensor:
    y = x + 0
    y[:, 1] = x[:, 1] / (BAD - x[:, 0])
    return y.mul_(1.0)


def unseen(x: Tensor) -> Tensor:
    squared: Tensor = _Square.apply(x)
    return squared


def roots(x: Tensor) -> Tensor:
    """Finite, with an infinite gradient at the marked sample."""
    return x + torch.sqrt((BAD - x[:, :1]) * x[:, 1:2] * 2)


def all_masked(x: Tensor) -> Tensor:
    """Softmax of rows of minus infinities."""
    mask = torch.zeros_like(x).masked_fill(x[:, :1] == BAD, -torch.inf)
    return x * torch.softmax(x + mask, dim=1)


def harmless(x: Tensor) -> Tensor:
    """Infinities that lead nowhere: a mask, and a logarithm that `where` throws away."""
    mask = torch.full((4,), -torch.inf).masked_fill(torch.tensor([True, False, False, False]), 0.0)
    logarithm = torch.where(x > 0, x, 1.0) * torch.where(x < 9, 0.0, (x - x).log())
    return x * torch.softmax(x + mask, dim=1) + logarithm.detach()


class Culprit(nn.Module):
    """One of the functions above, after harmless ones."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Net(nn.Module):
    """A culprit among modules that do no harm; the first number of a sample reaches it as it is."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.before = nn.Sequential(Culprit(harmless), nn.ReLU(inplace=True))
        self.blocks = nn.ModuleList([Culprit(nn.Identity()), Culprit(function)])
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.cat([x[:, :1], x[:, 1:] * self.scale], dim=1)
        x = kept + 0 * self.before(kept)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.drop(self.norm(x)))
        return out.squeeze(-1)


def faulty(function: Callable[[Tensor], Tensor], marks: list[int], samples: int = 16, value: float = BAD) -> Task:
    """A task whose samples at `marks` make `function` fail."""
    torch.manual_seed(0)

    def loss(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
        return (model(x) ** 2).sum(), len(x)

    return Task(Net(function), loss, Marked(samples, marks, value))
