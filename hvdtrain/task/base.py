"""The contract of a task, and how one is found by name. Imports no torch of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hvdtrain.errors import TaskError
from hvdtrain.loading import load

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.utils.data import Dataset

NAMED = {
    "image": "hvdtrain.task.image:image",
    "language_model": "hvdtrain.task.language_model:language_model",
}
"""Tasks that `--task` knows by a short name."""

TaskFunction = Callable[..., "Task"]


@dataclass(frozen=True)
class Task:
    """A model, its loss and its data.

    Args:
        model: parameters on the CPU; the trainer moves it to the rank's device.
        loss: takes the model and a batch on the device, returns the sum of the losses (a scalar tensor with
            gradient) and its weight: how many samples, tokens or the like were summed. What is minimised is
            the sum over the global batch divided by the weight over the global batch.
        train_data: map-style dataset (`__len__`, `__getitem__`).
        heldout_data: map-style dataset that is only evaluated on.
        optimizer: of the model's parameters. Without one the options under `optimizer` make it.
        schedule: factor on the optimizer's learning rates as a function of the step, 0 at the first. Without
            one the options under `optimizer` say, or the rate stays as it is where the task brings an optimizer.
        metrics: takes the model and a batch in evaluation, returns sum and weight by name.
        collate: makes a batch from a list of samples; torch's default without it.
        nominal_weight: weight of a typical sample; keeps gradients near the size of a mean. The mean itself is
            exact whatever stands here.
        unit: what `weight` counts, in the plural, as shown beside the speed.
        data_id: tells this training data from other data of the same length, such as a hash of it. Ranks whose
            data differ, and a resume with other data, are noticed by it.
    """

    model: nn.Module
    loss: Callable[[nn.Module, Any], tuple[Tensor, Tensor | float]]
    train_data: Dataset[Any]
    heldout_data: Dataset[Any] | None = None
    optimizer: Optimizer | None = None
    schedule: Callable[[int], float] | None = None
    metrics: Callable[[nn.Module, Any], Mapping[str, tuple[Tensor | float, Tensor | float]]] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    nominal_weight: float = 1.0
    unit: str = "samples"
    data_id: str = ""


def load_task_function(spec: str) -> TaskFunction:
    """Find the function that `spec` names: a short name, ``file.py:function`` or ``module:function``.

    Errors:
        TaskError: nothing of that name, with the names there are.
    """
    target = NAMED.get(spec, spec)
    place, colon, function_name = target.rpartition(":")
    if not colon or not place or not function_name:
        raise TaskError(
            f"there is no task {spec!r}",
            expected=f"one of {', '.join(sorted(NAMED))}, or file.py:function, or module:function",
        )
    return load(target, TaskError, "a function that returns a hvdtrain.Task")  # type: ignore[no-any-return]
