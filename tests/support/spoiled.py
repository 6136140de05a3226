"""The toy task with samples that spoil training, at given positions under seed 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from hvdtrain import Task
from hvdtrain.data.order import sample_indices
from tests.support.toy import toy

SAMPLES = 2000


class _Spoiled(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, good: Dataset[tuple[Tensor, Tensor]], bad: set[int], value: float) -> None:
        self.good, self.bad, self.value = good, bad, value

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.good[index]
        return (x, y * 0 + self.value) if index in self.bad else (x, y)


def spoiled(at: Sequence[int] = (300,), value: float = 1000.0) -> Task:
    """A small regression.

    Args:
        at: positions of the samples.
        value: what is to be learned of them.
    """
    task = toy(samples=SAMPLES, dropout=0.2)
    bad = set(sample_indices(np.array(at, np.int64), SAMPLES, 0).tolist())
    return replace(task, train_data=_Spoiled(task.train_data, bad, value))
