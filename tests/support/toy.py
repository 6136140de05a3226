"""A task that takes milliseconds: dropout, noise, a parameter that no sample uses, uneven weights, random samples."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from hvdtrain import Task


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Samples that draw random numbers when they are made."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(samples, 6, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self.x[index] + 0.01 * torch.randn(6)
        return x, self.x[index].sum()


class Net(nn.Module):
    def __init__(self, hidden: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Dropout(dropout), nn.Linear(hidden, 1))
        self.idle = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.layers[2].p:
            x = x * (1 + 0.01 * (random.random() + np.random.random()))
        return self.layers(x).squeeze(-1)


def toy(hidden: int = 16, samples: int = 50, dropout: float = 0.2, heldout: int = 10) -> Task:
    """A small regression.

    Args:
        hidden: width of the middle layer
        samples: training samples
        dropout: share of the middle layer that is dropped; 0 for no noise at all
        heldout: held-out samples
    """

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, y = batch
        weights = 1.0 + (x[:, 0] > 0)  # tokens of a sample: 1 or 2
        return (weights * (model(x) - y) ** 2).sum(), weights.sum()

    def metrics(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, tuple[float, float]]:
        return {"positive": (float((model(batch[0]) > 0).sum()), len(batch[0]))}

    held_out = Noisy(heldout) if heldout else None
    return Task(Net(hidden, dropout), loss, Noisy(samples), held_out, metrics=metrics, nominal_weight=1.5)
