"""A task that fails in a chosen way at a chosen step, on rank 1 or on every rank."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from hvdtrain import Task


def rank() -> int:
    """Return the rank, from the variables of mpirun, `horovodrun --gloo` or torchrun."""
    names = ("OMPI_COMM_WORLD_RANK", "HOROVOD_RANK", "RANK")
    return int(next((os.environ[name] for name in names if name in os.environ), "0"))


def _hang() -> None:
    threading.Event().wait()


def _raise() -> None:
    raise RuntimeError(f"rank {rank()} has had enough")


def _user() -> None:
    from hvdtrain.errors import DataError

    raise DataError("a sample is missing", expected="samples", found="none", next_step="bring some")


WAYS = {
    "raise": _raise,
    "user": _user,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "leave": lambda: sys.exit(3),
    "crash": lambda: ctypes.string_at(0),
    "memory": lambda: torch.empty(1 << 50),
    "hang": _hang,
}


class Samples(Dataset[Tensor]):
    def __init__(self, how: str, samples: int, bad: int) -> None:
        self.how, self.samples, self.bad = how, samples, bad
        self.read = 0

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        self.read += 1
        if self.read == self.bad and rank() == 1:
            WAYS[self.how]()
        return torch.full((3,), float(index))


def failing(how: str = "", at: int = 3, data: str = "", everywhere: bool = False) -> Task:
    """A task that fails.

    Args:
        how: what rank 1 does in a forward pass
        at: at which of its forward passes
        data: what rank 1 does in reading its tenth sample
        everywhere: every rank does it
    """
    passes = 0

    def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        nonlocal passes
        passes += 1
        if how and passes == at and (everywhere or rank() == 1):
            WAYS[how]()
        return model(batch).square().sum() * 1e-6, len(batch)

    return Task(nn.Linear(3, 1), loss, Samples(data, 64, 10 if data else 0))
