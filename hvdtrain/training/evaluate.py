"""Loss and metrics over held-out data, shared out among the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import allgather_json
from hvdtrain.data.loader import Seeded, sample_seed, seed_forward
from hvdtrain.data.order import micro_batches, share
from hvdtrain.task.base import Task
from hvdtrain.training.precision import Precision
from hvdtrain.training.step import checked_loss, checked_metrics, to_device


@dataclass(frozen=True)
class Evaluation:
    """Means over held-out samples, equal on all ranks.

    Attributes:
        loss: mean over the weight.
        metrics: means by name.
        samples: how many were looked at.
    """

    loss: float
    metrics: dict[str, float] = field(default_factory=dict)
    samples: int = 0


def evaluate(
    task: Task,
    model: nn.Module,
    comm: Comm,
    precision: Precision,
    device: torch.device,
    *,
    micro_batch: int,
    most: int,
    touch: Callable[[], None] | None = None,
) -> Evaluation | None:
    """Mean loss over `most` held-out samples (0: all), spread evenly, each used once at any number of ranks.

    Collective: yes. None where the task holds nothing out. Sums are in float64. Each module is left in its mode.
    Samples that draw random numbers when they are made are the same each time.
    `touch` is called after each batch: it makes progress.
    """
    if task.heldout_data is None or len(task.heldout_data) == 0:  # type: ignore[arg-type]
        return None
    length = len(task.heldout_data)  # type: ignore[arg-type]
    count = min(most, length) if most else length
    batches = micro_batches(0, count, micro_batch)
    mine = [batches[i] for i in share(len(batches), comm.rank, comm.size)]
    loader: DataLoader[Any] = DataLoader(
        Seeded(task.heldout_data),
        batch_sampler=[[sample_seed(0, b), *(i * length // count for i in range(b.start, b.stop))] for b in mine],
        collate_fn=task.collate,
    )
    sums: dict[str, list[float]] = {}
    modes = {module: module.training for module in model.modules()}
    model.eval()
    # Not inference_mode: what a model keeps from its first forward pass (positions, masks) must serve training too.
    with torch.no_grad(), precision.autocast():
        for place, batch in zip(mine, loader, strict=True):
            seed_forward(0, place.start)
            batch = to_device(batch, device)
            values: dict[str, tuple[Tensor | float, Tensor | float]] = {"loss": checked_loss(task, model, batch)}
            values |= {f"metric/{name}": pair for name, pair in checked_metrics(task, model, batch).items()}
            for name, (value, weight) in values.items():
                total = sums.setdefault(name, [0.0, 0.0])
                total[0] += float(value)
                total[1] += float(weight)
            if touch is not None:
                touch()
    for module, training in modes.items():
        module.training = training
    means = _means(allgather_json(comm, sums, name="evaluate"))
    return Evaluation(means.pop("loss"), {k.removeprefix("metric/"): v for k, v in means.items()}, count)


def _means(ranks: list[dict[str, list[float]]]) -> dict[str, float]:
    names = sorted({name for sums in ranks for name in sums})
    totals = {name: [sum(s[name][part] for s in ranks if name in s) for part in (0, 1)] for name in names}
    return {name: value / weight if weight else math.nan for name, (value, weight) in totals.items()}
