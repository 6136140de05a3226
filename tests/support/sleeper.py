"""A task that sleeps instead of computing, so that ranks that share cores are not late; on request one is."""

from __future__ import annotations

import gc
import time

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from hvdtrain import Task
from hvdtrain.runtime.environment import environ, rank_info

LENGTH = 1000


class Rows(Dataset[Tensor]):
    """Ones, `LENGTH` of them on average if they are ragged, else 4."""

    def __init__(self, *, ragged: bool) -> None:
        self.ragged = ragged

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(4 + (index * 7919) % (2 * LENGTH - 7) if self.ragged else 4)


class _Garbage:
    """In a cycle of references, so only the garbage collector ends it, which takes this long."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.cycle = seconds, self

    def __del__(self) -> None:
        time.sleep(self.seconds)


def sleeper(step_ms: float = 100.0, late_rank: int = -1, late_ms: float = 0.0, late_in: str = "forward") -> Task:
    """Sleep through each step.

    Args:
        step_ms: of every rank
        late_rank: the rank that sleeps longer; -1 for none
        late_ms: by how much
        late_in: some of these, with commas between: forward; data; two (forward, also of the next rank); gc (while
            garbage is collected); length (all ranks, by as much for a text of mean length)
    """
    rank, kinds = rank_info(environ()).rank, {*late_in.split(",")}
    is_late = rank == late_rank or ("two" in kinds and rank == late_rank + 1)
    more_s = late_ms / 1e3 if is_late else 0.0

    def collate(rows: list[Tensor]) -> Tensor:
        if "data" in kinds:
            time.sleep(more_s)
        return torch.stack(rows)

    def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
        late_s = more_s if kinds & {"forward", "two"} else 0.0
        if "length" in kinds:
            late_s += late_ms / 1e3 * batch.numel() / LENGTH
        if "gc" in kinds and is_late:
            _Garbage(more_s)
            gc.collect()
        time.sleep(step_ms / 1e3 + late_s)
        return model(batch[:, :4]).sum(), torch.tensor(float(len(batch)))

    return Task(nn.Linear(4, 1), loss, Rows(ragged="length" in kinds), None, collate=collate)
