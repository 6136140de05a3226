"""Loss and metrics over held-out data, shared among the ranks. The host does not wait for the device meanwhile.

Metric objects are those of torchmetrics, which itself would gather with torch.distributed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.comm.base import Comm
from hvdtrain.comm.dimensions import ONE, Dimensions
from hvdtrain.comm.objects import allgather_json
from hvdtrain.config.schema import Config
from hvdtrain.data.loader import Batches, sample_seed, seed_forward
from hvdtrain.data.order import MicroBatch, micro_batches
from hvdtrain.errors import TaskError
from hvdtrain.task.base import Task
from hvdtrain.training.loop.forward import Precision, checked_loss, checked_metrics, to_device


@dataclass(frozen=True)
class Evaluation:
    """Means over the weight of held-out samples, equal on all ranks."""

    loss: float
    metrics: dict[str, float] = field(default_factory=dict)
    samples: int = 0


class HeldOut:
    """Held-out samples of a rank, in batches: `train.eval_samples` (0: all), evenly spaced, each on one rank.

    Ranks of `dimensions` that have the same samples evaluate the same. Samples that draw random numbers are the same in
    each evaluation. Loader processes start with the first evaluation, and stay.

    With `uniform`, ranks with fewer micro-batches repeat some of rank 0's, which do not count.

    Attributes:
        count: samples of all ranks; 0 if the task has no held-out data.
        compiled_for: samples of a batch in training, if the model is compiled; else 0.
    """

    def __init__(
        self,
        task: Task,
        comm: Comm,
        config: Config,
        device: torch.device,
        dimensions: Dimensions = ONE,
        *,
        uniform: bool = False,
    ) -> None:
        place, places, _ = dimensions.samples(comm.rank, comm.size)
        self.task, self.comm, self.device, self.count = task, comm, device, 0
        if task.heldout_data is None or len(task.heldout_data) == 0:  # type: ignore[arg-type]
            return
        self._length = length = len(task.heldout_data)  # type: ignore[arg-type]
        self.count = min(config.train.eval_samples or length, length)
        mine, first = (micro_batches([(0, self.count)], config.train.micro_batch, each, places) for each in (place, 0))
        self._own = len(mine) if dimensions.loss_counts(comm.rank, comm.size) else 0
        self._mine = mine + (first[len(mine) :] if uniform else [])
        self.compiled_for = config.train.micro_batch if config.train.compile else 0
        data, collate, on_cuda = task.heldout_data, task.collate, device.type == "cuda"
        self._batches = Batches(data, self._keys, config.loader, collate, on_cuda=on_cuda, persistent=True)

    def _keys(self) -> Iterator[list[int]]:
        for b in self._mine:
            yield [sample_seed(0, b), *(i * self._length // self.count for i in range(b.start, b.stop))]

    def __iter__(self) -> Iterator[tuple[MicroBatch, Any, bool]]:
        """Yield micro-batches, and whether they count."""
        for number, (place, drawn) in enumerate(zip(self._mine, self._batches, strict=True)):
            yield place, drawn.batch, number < self._own


def evaluate(
    held_out: HeldOut,
    model: nn.Module,
    precision: Precision,
    touch: Callable[[], object] = lambda: None,
    on_pass: Callable[[MicroBatch, dict[str, tuple[Tensor | float, Tensor | float]]], None] = lambda place, sums: None,
) -> Evaluation | None:
    """Return the mean loss over held-out samples, each used once; None if there are none. Collective: yes.

    Sums are in float64. Each module returns to its mode. `touch` is called after each batch, `on_pass` with the sums
    and weights of each that counts, on the device. The parameters are those of the last step (`Engine.complete`).
    """
    if not held_out.count:
        return None
    task, found = held_out.task, dict[str, list[tuple[Tensor | float, Tensor | float]]]()
    objects = MetricObjects(task.metric_objects, held_out.comm, held_out.device)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    # Not inference_mode: training must be able to use what a model caches here (positions, masks).
    with torch.no_grad(), precision.weights(), precision.autocast():
        for place, batch, counts in held_out:
            seed_forward(0, place.start)
            batch = to_device(batch, held_out.device)
            # Once torch has seen two sizes, it compiles code for any size, which is slower, and training would run it.
            other = held_out.compiled_for not in (0, place.stop - place.start)
            with torch.compiler.set_stance("force_eager") if other else nullcontext():
                values: dict[str, tuple[Tensor | float, Tensor | float]] = {"loss": checked_loss(task, model, batch)}
                pairs, inputs = checked_metrics(task, model, batch)
            values |= {f"metric/{name}": pair for name, pair in pairs.items()}
            if counts:
                objects.update(inputs)
                on_pass(place, values)
                for name, pair in values.items():
                    found.setdefault(name, []).append(pair)
            touch()
    for module, training in modes.items():
        module.training = training
    numbers = {name: [_on_host(parts) for parts in zip(*pairs, strict=True)] for name, pairs in found.items()}
    means = _means(allgather_json(held_out.comm, numbers, name="evaluate"))
    loss = means.pop("loss")
    metrics = {name.removeprefix("metric/"): mean for name, mean in means.items()}
    return Evaluation(loss, metrics | objects.compute(), held_out.count)


def _on_host(numbers: Sequence[Tensor | float]) -> list[float]:
    """Return numbers on the host, which waits for the device once."""
    tensors = [number.double().reshape(1) for number in numbers if isinstance(number, Tensor)]
    if len(tensors) == len(numbers):
        return torch.cat(tensors).tolist()
    return [float(number) for number in numbers]


def _means(ranks: list[dict[str, list[list[float]]]]) -> dict[str, float]:
    """Return means over the values of passes, which are in order: their bits do not depend on the number of ranks."""
    names = sorted({name for values in ranks for name in values})
    totals = {
        name: [sum(n for own in ranks if name in own for n in own[name][part]) for part in (0, 1)] for name in names
    }
    return {name: value / weight if weight else math.nan for name, (value, weight) in totals.items()}


class MetricObjects:
    """The metric objects of a task, for one evaluation.

    Args:
        metrics: objects of torchmetrics, by name.
        comm: the ranks.
        device: of what `update` gets.

    Errors: TaskError: a metric keeps a list of unrelated values, which cannot be gathered.
    """

    def __init__(self, metrics: Mapping[str, Any], comm: Comm, device: torch.device) -> None:
        self._metrics, self._comm = metrics, comm
        for name, metric in metrics.items():
            lists = [state for state, value in metric.metric_state.items() if isinstance(value, list)]
            if any(metric._reductions[state] is None for state in lists):
                raise TaskError(
                    f"the metric {name!r} cannot be gathered from several ranks",
                    expected="states that are summed, or lists that are concatenated (dist_reduce_fx)",
                    found=f"{type(metric).__name__} with a list that has no dist_reduce_fx",
                )
            metric.to(device)
            metric.reset()
            metric.dist_sync_fn, metric.distributed_available_fn = self._gather, lambda: comm.size > 1

    def update(self, inputs: Mapping[str, tuple[Any, ...]]) -> None:
        """Add a batch: the arguments of `update`, by name."""
        for name, values in inputs.items():
            self._metrics[name].update(*values)

    def compute(self) -> dict[str, float]:
        """Return the value of each metric over all batches of all ranks. Collective: yes.

        Errors: TaskError: a value is not one number.
        """
        found = {}
        for name, metric in self._metrics.items():
            metric._update_count = 1  # it warns on a rank without samples
            value = metric.compute()
            if isinstance(value, Tensor) and value.numel() != 1:
                raise TaskError(
                    f"the metric {name!r} has {value.numel()} values",
                    expected="one number, such as with average='macro'",
                    everywhere=True,
                )
            found[name] = float(value)
        return found

    def _gather(self, tensor: Tensor, group: Any = None) -> list[Tensor]:
        """Return the tensors of all ranks; their first dimension may differ. A rank without data has an empty one."""
        facts = allgather_json(self._comm, [list(tensor.shape), str(tensor.dtype)], name="metric/form")
        shape, dtype = next(([shape, dtype] for shape, dtype in facts if 0 not in shape), facts[0])
        own = tensor.detach().to(getattr(torch, dtype.removeprefix("torch."))).cpu().flatten()
        parts = self._comm.allgather(own, name="metric/state").wait().to(tensor.device)
        shapes = [each if 0 not in each else [0, *shape[1:]] for each, _ in facts]
        lengths = [math.prod(each) for each in shapes]
        return [part.reshape(each) for part, each in zip(torch.split(parts, lengths), shapes, strict=True)]
