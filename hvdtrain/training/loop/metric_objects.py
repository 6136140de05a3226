"""Metric objects of torchmetrics over all ranks. torchmetrics itself would gather with torch.distributed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import allgather_json
from hvdtrain.errors import TaskError


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
