"""The toy, so slow in the first start of a Slurm job that it is not done when something happens to it."""

from __future__ import annotations

import os
import time
from dataclasses import replace

from torch import Tensor

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
    """The toy.

    Args:
        sample_s: what a sample takes in the first start of a job
    """
    first = "SLURM_JOB_ID" in os.environ and "SLURM_RESTART_COUNT" not in os.environ
    return replace(toy(), train_data=Slow(50, sample_s)) if first else toy()
