"""Evaluate a model on all ranks, without training: each sample once, with sums that do not depend on the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import allgather_json, on_rank_0
from hvdtrain.config.schema import Config
from hvdtrain.data.loader import dataset_length
from hvdtrain.errors import DataError
from hvdtrain.plan.plan import BF16_WEIGHTS
from hvdtrain.state.frozen import find_frozen
from hvdtrain.state.pieces import StateDict
from hvdtrain.state.sync import broadcast_state
from hvdtrain.state.train_state import Progress, TrainState
from hvdtrain.training.loop.bf16_weights import Bf16Weights
from hvdtrain.training.loop.evaluate import HeldOut, evaluate
from hvdtrain.training.loop.forward import Precision, autocast_experts
from hvdtrain.training.start.device import pick_device
from hvdtrain.training.start.make_task import make_task

Split = Literal["heldout", "train"]
Sums = dict[str, list[float]]  # sum and weight of the loss, and of each metric as ``metric/NAME``


@dataclass(frozen=True)
class Evaluated:
    """Values of a model over samples, equal on all ranks."""

    means: Mapping[str, float]  # of the loss, and of each metric by name
    samples: int  # their number
    unit: str  # of the weight of the loss
    passes: list[tuple[int, Sums]]  # the first sample of each forward pass, and its sums; in order


def evaluate_run(
    config: Config, build: Callable[[], Any], load: Callable[[], StateDict] | None, comm: Comm, split: Split
) -> Evaluated:
    """Evaluate the model of a task, with the state that `load` returns on rank 0. Collective: yes.

    The model is whole on each rank, whichever engine trained it. `load` is None for the task's own weights.

    Errors: DataError: there are no samples of the split; CheckpointError: the state is that of another model; others:
    those of the task.
    """
    device = pick_device(config.parallel.device, comm.local_rank, comm.local_size, comm)
    task = make_task(build, config)
    if split == "train" and dataset_length(task.train_data):
        task = replace(task, heldout_data=task.train_data)
    if task.prepare is not None:
        task.prepare(device, torch.float32)
    model = task.model.to(device)
    if config.precision != "fp32":
        autocast_experts(model)
    frozen = find_frozen(task.model) if task.remakes_frozen else None
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.0), torch.amp.GradScaler(enabled=False)
    state = TrainState(model, optimizer, scaler, Progress(), frozen=frozen)
    if load is not None:
        on_rank_0(comm, lambda: state.load_model(load()), name="evaluate/load")
    if comm.size > 1:
        broadcast_state(state, comm)
    precision = Precision(config.precision, device, Bf16Weights(model) if config.precision == BF16_WEIGHTS else None)
    samples = HeldOut(task, comm, config, device)
    if not samples.count:
        raise DataError(
            "there are no samples to evaluate on",
            expected="held-out samples",
            next_step="hold some out (--data.heldout), or evaluate on the training data: --split train",
            everywhere=True,
        )
    own: list[tuple[int, dict[str, Any]]] = []
    found = evaluate(samples, model, precision, on_pass=lambda place, sums: own.append((place.start, sums)))
    numbers = [(start, {name: [float(part) for part in pair] for name, pair in sums.items()}) for start, sums in own]
    gathered = allgather_json(comm, numbers, name="evaluate/passes")
    passes: list[tuple[int, Sums]] = [(start, sums) for each in gathered for start, sums in each]
    names = sorted({name for _, sums in passes for name in sums})
    means = {name.removeprefix("metric/"): _mean([sums[name] for _, sums in passes if name in sums]) for name in names}
    means |= {name: value for name, value in found.metrics.items() if name in task.metric_objects} if found else {}
    return Evaluated(means, samples.count, task.unit, passes)


def _mean(pairs: list[list[float]]) -> float:
    """Return the sum over the weight, each rounded once: in any order the same."""
    value, weight = (math.fsum(pair[part] for pair in pairs) for part in (0, 1))
    return value / weight if weight else math.nan


def for_evaluation(config: Config, samples: int, *, one_by_one: bool) -> Config:
    """Return a config that evaluates `samples` (0: all), in passes of one sample if wanted."""
    size = 1 if one_by_one else config.train.micro_batch
    return replace(config, train=replace(config.train, eval_samples=samples, micro_batch=size))
