"""The toy task with something else about it, which a test needs."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from torch import Tensor, nn

from hvdtrain import Task
from hvdtrain.data.order import sample_indices
from tests.support.toy import Noisy, toy

Sample = tuple[Tensor, Tensor]


class Changed(Noisy):
    """Samples that a function changes, or takes its time for, by their index."""

    def __init__(self, samples: int, change: Callable[[int, Sample], Sample]) -> None:
        super().__init__(samples)
        self.change = change

    def __getitem__(self, index: int) -> Sample:
        return self.change(index, super().__getitem__(index))


def spoiled(at: Sequence[int] = (300,), value: float = 1000.0) -> Task:
    """Samples that spoil training, at given positions under seed 0.

    Args:
        at: positions of the samples.
        value: what is to be learned of them.
    """
    bad = set(sample_indices(np.array(at, np.int64), 2000, 0).tolist())
    data = Changed(2000, lambda index, xy: (xy[0], xy[1] * 0 + value) if index in bad else xy)
    return replace(toy(dropout=0.2), train_data=data)


def slow(sample_s: float) -> Task:
    """The toy with samples that take `sample_s` to be made."""
    return replace(toy(), train_data=Changed(50, lambda index, xy: (time.sleep(sample_s), xy)[1]))


def paced(sample_s: float = 0.1) -> Task:
    """The toy, so slow in the first start of a Slurm job that it is not done when something happens to it.

    Args:
        sample_s: what a sample takes in the first start of a job
    """
    first = "SLURM_JOB_ID" in os.environ and "SLURM_RESTART_COUNT" not in os.environ
    return slow(sample_s) if first else toy()


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


def listening(samples: int = 41) -> Task:
    """Each rank writes down once what its process listens on and whether Horovod's notifications run.

    Args:
        samples: training samples
    """
    task = toy(samples=samples)
    loss, written = task.loss, Path(f"listening-{os.getpid()}.json")

    def looking(model: nn.Module, batch: Any) -> Any:
        if not written.exists():
            connections = psutil.Process().net_connections("inet")
            elastic = sys.modules.get("horovod.common.elastic")
            facts = {
                "ports": [[c.laddr.ip, c.laddr.port] for c in connections if c.status == "LISTEN"],
                "peers": [c.raddr.ip for c in connections if c.status == "ESTABLISHED"],
                "notifications": elastic is not None and elastic.notification_manager._service is not None,
            }
            written.write_text(json.dumps(facts))
        return loss(model, batch)

    return replace(task, loss=looking)
