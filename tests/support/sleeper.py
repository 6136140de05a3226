"""A task that sleeps instead of computing, so that ranks that share cores are not late; on request one is."""

from __future__ import annotations

import itertools
import time

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from hvdtrain import Task
from hvdtrain.runtime.environment import environ, rank_info


class Rows(Dataset[Tensor]):
    """Ones."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(4)


def sleeper(
    step_ms: float = 100.0, late_rank: int = -1, late_ms: float = 0.0, late_in: str = "forward", moves_at: int = 0
) -> Task:
    """Sleep through each step.

    Args:
        step_ms: of every rank
        late_rank: the rank that sleeps longer; -1 for none
        late_ms: by how much
        late_in: forward or data
        moves_at: pass from which the next rank is late instead; 0 for none
    """
    rank, passes = rank_info(environ()).rank, itertools.count(1)
    more_s = late_ms / 1e3 if rank == late_rank else 0.0

    def collate(rows: list[Tensor]) -> Tensor:
        if late_in == "data":
            time.sleep(more_s)
        return torch.stack(rows)

    def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
        late_s = more_s if late_in == "forward" else 0.0
        if moves_at and next(passes) >= moves_at:
            late_s = late_ms / 1e3 if rank == late_rank + 1 else 0.0
        time.sleep(step_ms / 1e3 + late_s)
        return model(batch).sum(), torch.tensor(float(len(batch)))

    return Task(nn.Linear(4, 1), loss, Rows(), None, collate=collate)
