"""Evaluate a checkpoint on all ranks, without training: each sample once, with sums that do not depend on the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import allgather_json, on_rank_0
from hvdtrain.config.schema import Config
from hvdtrain.errors import DataError
from hvdtrain.plan.plan import BF16_WEIGHTS
from hvdtrain.state.frozen import find_frozen
from hvdtrain.state.pieces import StateDict
from hvdtrain.state.sync import broadcast_state
from hvdtrain.state.train_state import Progress, TrainState
from hvdtrain.task.base import Task
from hvdtrain.training.loop.bf16_weights import Bf16Weights
from hvdtrain.training.loop.evaluate import HeldOut, evaluate
from hvdtrain.training.loop.forward import Precision, autocast_experts
from hvdtrain.training.start.device import pick_device
from hvdtrain.training.start.make_task import make_task

Split = Literal["heldout", "train"]
Sums = dict[str, list[float]]
"""Sum and weight of the loss, and of each metric as ``metric/NAME``."""


@dataclass(frozen=True)
class Evaluated:
    """Values of a model over samples, equal on all ranks.

    Attributes:
        means: of the loss, and of each metric by name.
        samples: their number.
        unit: of the weight of the loss.
        passes: the first sample of each forward pass, and its sums; in order.
    """

    means: Mapping[str, float]
    samples: int
    unit: str
    passes: list[tuple[int, Sums]]


def evaluate_run(
    config: Config, build: Callable[[], Any], load: Callable[[], StateDict] | None, comm: Comm, split: Split
) -> Evaluated:
    """Evaluate the model of a task, with the state that `load` returns on rank 0. Collective: yes.

    The model is whole on each rank, whichever engine trained it. `load` is None for the task's own weights.

    Errors:
        DataError: there are no samples of the split.
        CheckpointError: the state is that of another model.
        Others: those of the task.
    """
    device = pick_device(config.parallel.device, comm.local_rank, comm.local_size, comm)
    task = make_task(build, config)
    task = replace(task, heldout_data=task.train_data) if split == "train" else task
    if task.prepare is not None:
        task.prepare(device, torch.float32)
    model = task.model.to(device)
    if config.precision != "fp32":
        autocast_experts(model)
    _load(task, load, comm)
    precision = Precision(config.precision, device, Bf16Weights(model) if config.precision == BF16_WEIGHTS else None)
    on_cuda = device.type == "cuda"
    samples = HeldOut(task, comm, config, on_cuda=on_cuda)
    if not samples.count:
        raise DataError(
            "there are no samples to evaluate on",
            expected="held-out samples",
            next_step="hold some out (--data.heldout), or evaluate on the training data: --split train",
            everywhere=True,
        )
    own: list[tuple[int, dict[str, Any]]] = []
    found = evaluate(
        task, model, comm, precision, device, samples, on_pass=lambda place, sums: own.append((place.start, sums))
    )
    passes = list(_gathered([(start, _numbers(sums)) for start, sums in own], comm))
    names = sorted({name for _, sums in passes for name in sums})
    means = {name.removeprefix("metric/"): _mean([sums[name] for _, sums in passes if name in sums]) for name in names}
    means |= {name: value for name, value in found.metrics.items() if name in task.metric_objects} if found else {}
    return Evaluated(means, samples.count, task.unit, passes)


def _load(task: Task, load: Callable[[], StateDict] | None, comm: Comm) -> None:
    """Give the models of all ranks the state that `load` returns on rank 0."""
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.0)
    frozen = find_frozen(task.model) if task.remakes_frozen else None
    state = TrainState(task.model, optimizer, torch.amp.GradScaler(enabled=False), Progress(), frozen=frozen)
    if load is not None:
        on_rank_0(comm, partial(_load_here, state, load), name="evaluate/load")
    if comm.size > 1:
        broadcast_state(state, comm)


def _load_here(state: TrainState, load: Callable[[], StateDict]) -> None:
    state.load_model(load())


def _numbers(sums: Mapping[str, tuple[Tensor | float, Tensor | float]]) -> Sums:
    return {name: [float(part) for part in pair] for name, pair in sums.items()}


def _gathered(own: list[tuple[int, Sums]], comm: Comm) -> Iterator[tuple[int, Sums]]:
    for each in allgather_json(comm, own, name="evaluate/passes"):
        yield from ((start, sums) for start, sums in each)


def _mean(pairs: list[list[float]]) -> float:
    """Return the sum over the weight, each rounded once: in any order the same."""
    value, weight = (math.fsum(pair[part] for pair in pairs) for part in (0, 1))
    return value / weight if weight else math.nan


def for_evaluation(config: Config, samples: int, *, one_by_one: bool) -> Config:
    """Return a config that evaluates `samples` (0: all), in passes of one sample if wanted."""
    size = 1 if one_by_one or config.train.micro_batch == "auto" else config.train.micro_batch
    return replace(config, train=replace(config.train, eval_samples=samples, micro_batch=size))
