"""The toy task with something else about it, which a test needs."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from hvdtrain import Task
from tests.support.toy import Noisy, toy


class Slow(Noisy):
    """Samples that take `sample_s` to be made."""

    def __init__(self, samples: int, sample_s: float) -> None:
        super().__init__(samples)
        self.sample_s = sample_s

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self.sample_s)
        return super().__getitem__(index)


def paced(sample_s: float = 0.1) -> Task:
    """The toy, so slow in the first start of a Slurm job that it is not done when something happens to it.

    Args:
        sample_s: what a sample takes in the first start of a job
    """
    first = "SLURM_JOB_ID" in os.environ and "SLURM_RESTART_COUNT" not in os.environ
    return replace(toy(), train_data=Slow(50, sample_s)) if first else toy()


def forgetful() -> Task:
    """State that no checkpoint holds: the loss is another one after every call."""
    task, calls = toy(), [0]

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | float]:
        value, weight = task.loss(model, batch)
        calls[0] += model.training
        return value * (1.0 + 0.01 * calls[0]), weight

    return replace(task, loss=loss)


def interrupting() -> Task:
    """A signal to whoever waits for the job, as a person would send it: INTERRUPTED has its name and the process."""
    if os.environ.get("OMPI_COMM_WORLD_RANK", "0") == "0":
        name, process = os.environ["INTERRUPTED"].split()
        os.kill(int(process), signal.Signals[name])
    return toy()
