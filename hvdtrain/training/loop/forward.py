"""One forward pass: its precision, its batch on the device, and the task's functions with their results checked."""

from __future__ import annotations

import copy
import math
import sys
from collections import UserDict
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.errors import TaskError
from hvdtrain.task.base import Task
from hvdtrain.training.loop.bf16_weights import Bf16Weights

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def forward_dtype(precision: str) -> torch.dtype:
    """Return the dtype of most operations of a forward pass."""
    return _AUTOCAST.get(precision.removesuffix("-weights"), torch.float32)


class Precision:
    """Number formats of forward and backward: autocast, copies of weights, and loss scaling for fp16.

    Args:
        name: fp32, bf16, fp16 or bf16-weights.
        weights: makes the copies for bf16-weights; None if the engine does.

    Attributes:
        scaler: torch's GradScaler; it passes values through unless the format is fp16.
    """

    def __init__(self, name: str, device: torch.device, weights: Bf16Weights | None = None) -> None:
        self._dtype = _AUTOCAST.get(name)
        self._device_type = device.type
        self._weights = weights
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context of a forward pass."""
        if self._dtype is None:
            return nullcontext()
        return torch.autocast(self._device_type, dtype=self._dtype)

    def weights(self, wait: Callable[[], object] = lambda: None) -> AbstractContextManager[object]:
        """Return the context of forward and backward passes; `wait` is called before weights are copied."""
        if self._weights is None:
            return nullcontext()
        wait()
        return self._weights()


class _Cast:
    """Experts of transformers, with weights that read as another dtype. Gradients have the dtype of the weights."""

    def __init__(self, experts: nn.Module, dtype: torch.dtype) -> None:
        self._experts, self._dtype = experts, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._experts, name)
        # Where experts are divided, this rank's part takes the place of a parameter.
        is_weight = name in self._experts._parameters and isinstance(value, Tensor) and value.is_floating_point()
        return value.to(self._dtype) if is_weight else value


def autocast_experts(model: nn.Module) -> None:
    """Let autocast cover the experts of transformers' models, in place.

    Their default implementation calls an operator that autocast does not know (pytorch/pytorch#174763), in the dtype
    of the weights. On a CPU, forward and backward with 16 experts take 0.75 of the time (`benchmarks/experts.py`).
    """
    moe: Any = sys.modules.get("transformers.integrations.moe")
    if not hasattr(moe, "ALL_EXPERTS_FUNCTIONS"):
        return

    def forward(experts: nn.Module, hidden: Tensor, *routing: Tensor) -> Tensor:
        device = hidden.device.type
        cast = _Cast(experts, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else experts
        result: Tensor = moe.grouped_mm_experts_forward(cast, hidden, *routing)
        return result

    moe.ALL_EXPERTS_FUNCTIONS.register("grouped_mm_autocast", forward)
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "_experts_implementation", None) == "grouped_mm":
            config._experts_implementation = "grouped_mm_autocast"


def checked_loss(task: Task, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | float]:
    """Call the task's loss function; return the sum of losses and its weight.

    Errors: TaskError: the result is of the wrong form, or the weight is negative or not finite.
    """
    result: Any = task.loss(model, batch)
    if isinstance(result, tuple) and len(result) == 2:
        loss, weight = result
        is_number = _is_number(weight)
        if is_number and not getattr(weight, "is_cuda", False):  # on a GPU, the sum over the global batch is checked
            weight = float(weight)  # also numpy's numbers, which the journal cannot hold
            if not 0 <= weight < math.inf:
                raise TaskError(
                    "the task's loss function returned an invalid weight",
                    expected="the number of samples or tokens in the sum: finite, >= 0",
                    found=str(weight),
                )
        if isinstance(loss, Tensor) and loss.dim() == 0 and loss.is_floating_point() and is_number:
            return loss, weight
    raise TaskError(
        "the task's loss function returned an invalid value",
        expected="(loss, weight): the sum of the losses as a scalar tensor, and the number of samples or tokens in it",
        found=describe(result),
    )


def checked_metrics(
    task: Task, model: nn.Module, batch: Any
) -> tuple[dict[str, tuple[Tensor | float, Tensor | float]], dict[str, tuple[Any, ...]]]:
    """Call the task's metrics function; return (sum, weight) by name, and what each metric object gets.

    Errors: TaskError: the result is of the wrong form.
    """
    result: Any = task.metrics(model, batch) if task.metrics else {}
    valid = isinstance(result, Mapping) and all(isinstance(values, tuple) for values in result.values())
    pairs = {name: values for name, values in result.items() if name not in task.metric_objects} if valid else {}
    inputs = {name: values for name, values in result.items() if name not in pairs} if valid else {}
    if not valid or not all(len(pair) == 2 and all(map(_is_number, pair)) for pair in pairs.values()):
        raise TaskError(
            "the task's metrics function returned an invalid value",
            expected="a dict of (sum, weight) by name: the sum over the batch, and the number of samples or tokens in"
            " it",
            found=describe(result),
        )
    if missing := sorted(task.metric_objects.keys() - inputs.keys()):
        raise TaskError(
            f"the task's metrics function returned nothing for the metric object {missing[0]!r}",
            expected="the arguments of its update, as a tuple",
            found=f"values for {', '.join(map(repr, result)) or 'no names'}",
        )
    return pairs, inputs


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, Real)) or (isinstance(value, Tensor) and value.numel() == 1)


def describe(value: Any) -> str:
    """Return a value's type and form, for an error message."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__} of ({', '.join(describe(v) for v in value)})"
    return f"{type(value).__name__} {value!r}"[:200]


def to_device(batch: Any, device: torch.device) -> Any:
    """Move the tensors in nested tuples, lists and mappings to `device`, and values with a method `to`.

    Batches of transformers' collators are `UserDict`s. A mapping that cannot be changed becomes a dict. Other values
    stay as they are.
    """
    if isinstance(batch, Tensor):
        return batch if batch.device == device else batch.to(device, non_blocking=True)
    if type(batch) in (tuple, list):
        return type(batch)([to_device(value, device) for value in batch])
    if callable(getattr(batch, "to", None)) and not isinstance(batch, UserDict):
        return batch.to(device)
    if isinstance(batch, Mapping):
        on_device = {key: to_device(value, device) for key, value in batch.items()}
        if not isinstance(batch, MutableMapping):
            return on_device
        moved: Any = copy.copy(batch)
        moved.update(on_device)
        return moved
    if isinstance(batch, (tuple, list)):
        values = [to_device(value, device) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch


def batch_size(batch: Any) -> int:
    """Return the elements of the largest tensor of a batch, such as its tokens with padding; 0 without tensors."""
    if isinstance(batch, Tensor):
        return batch.numel()
    values = batch if isinstance(batch, (tuple, list)) else batch.values() if isinstance(batch, Mapping) else ()
    return max(map(batch_size, values), default=0)
