"""A task that sleeps instead of computing, so that ranks that share cores are not late; on request one is."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
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


def _stop_often(stopped_s: float) -> None:
    """Stop this process each second, until it ends."""
    signals = f"kill -STOP {os.getpid()} && sleep {stopped_s} && kill -CONT {os.getpid()}"
    subprocess.Popen(["sh", "-c", f"while {signals}; do sleep 1; done"], stdin=subprocess.DEVNULL)


class _Garbage:
    """In a cycle of references, so only the garbage collector ends it, which takes this long."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.cycle = seconds, self

    def __del__(self) -> None:
        time.sleep(self.seconds)


def sleeper(
    step_ms: float = 100.0, late_rank: int = -1, late_ms: float = 0.0, late_in: str = "forward", moves_at: int = 0
) -> Task:
    """Sleep through each step.

    Args:
        step_ms: of every rank
        late_rank: the rank that sleeps longer; -1 for none
        late_ms: by how much
        late_in: forward or data; two: forward, also of the next rank; often: forward in four of five passes; seldom:
            forward in every 16th pass; gc: while garbage is collected, in every pass; length: of all ranks, by as much
            for a text of mean length; stops: the process of the late rank is stopped for this time, once a second
        moves_at: pass from which the next rank is late instead; 0 for none
    """
    rank, passes = rank_info(environ()).rank, itertools.count(1)
    is_late = rank == late_rank or (late_in == "two" and rank == late_rank + 1)
    more_s = late_ms / 1e3 if is_late else 0.0
    if late_in == "stops" and more_s:
        _stop_often(more_s)

    def collate(rows: list[Tensor]) -> Tensor:
        if late_in == "data":
            time.sleep(more_s)
        return torch.stack(rows)

    def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
        number = next(passes)
        is_now = {"forward": True, "two": True, "often": number % 5 != 0, "seldom": number % 16 == 0}.get(late_in)
        late_s = more_s if is_now else 0.0
        if late_in == "length":
            late_s = late_ms / 1e3 * batch.numel() / LENGTH
        if late_in == "gc" and is_late:
            _Garbage(more_s)
            gc.collect()
        if moves_at and number >= moves_at:
            late_s = late_ms / 1e3 if rank == late_rank + 1 else 0.0
        time.sleep(step_ms / 1e3 + late_s)
        return model(batch[:, :4]).sum(), torch.tensor(float(len(batch)))

    return Task(nn.Linear(4, 1), loss, Rows(ragged=late_in == "length"), None, collate=collate)
