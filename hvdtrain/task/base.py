"""The contract of a task, and loading one by name. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from hvdtrain.errors import TaskError
from hvdtrain.loading import load

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.utils.data import Dataset

NAMED = {"image": "hvdtrain.task.image:image", "language_model": "hvdtrain.task.language_model:language_model"}
"""Short names of `--task`."""

TaskFunction = Callable[..., "Task"]
Loss = Callable[["nn.Module", Any], "tuple[Tensor, Tensor | float]"]
Metrics = Callable[["nn.Module", Any], Mapping[str, tuple[Any, ...]]]


@dataclass(frozen=True)
class SequencePart:
    """One of the equal parts of each sequence, on one of the ranks that divide it.

    Attributes:
        index: of the part, from 0.
        count: number of parts.
        exchange: takes a tensor and two of its dimensions. It sends the n-th of `count` equal shares along the first
            dimension to the rank of part n, and returns those received, joined along the second one. Gradients go back
            the same way. Collective: yes, among the ranks of the parts.
    """

    index: int
    count: int
    exchange: Callable[[Tensor, int, int], Tensor]

    def of(self, rows_BT: Tensor) -> Tensor:
        """Return the part of rows of tokens; their number is a multiple of `count`."""
        width = rows_BT.shape[1] // self.count
        return rows_BT[:, self.index * width : (self.index + 1) * width]


@dataclass(frozen=True)
class Task:
    """A model, its loss and its data.

    Args:
        model: parameters on the CPU. The trainer moves the model to the rank's device.
        loss: takes the model and a batch on the device. Returns the sum of the losses (a scalar tensor with
            gradient) and its weight, the number of samples, tokens or the like in the sum. Training minimises the
            sum over the global batch divided by the weight over the global batch.
        train_data: map-style data set (`__len__`, `__getitem__`), or an iterable one. Each rank reads all samples of an
            iterable one, but collates only its own; see `hvdtrain.data.iterable.IterableSamples`.
        heldout_data: map-style dataset for evaluation only.
        optimizer: optimizer of the model's parameters (default: made from the options under `optimizer`).
        schedule: factor on the optimizer's learning rates as a function of the step, counted from 0, or of the step
            and the number of steps of the run: ``lambda step, steps: 1 - step / steps``. By default the options under
            `optimizer` decide, or the rate is constant if the task brings an optimizer.
        metrics: takes the model and a batch in evaluation. Returns a sum and a weight by name; for the names of
            `metric_objects`, the arguments of their `update`, such as predictions and targets.
        metric_objects: metrics of torchmetrics by name.
        collate: makes a batch from a list of samples (default: torch's).
        nominal_weight: weight of a typical sample. It keeps gradients near the size of a mean; the mean is exact
            with any value.
        unit: the unit of `weight` in the plural, to show the speed.
        data_id: distinguishes this training data from other data of the same length, such as a hash. It reveals
            ranks with different data, and a resume with other data.
        remakes_frozen: whether the task function, called again with the same options, makes parameters that require no
            gradient with the same values. Checkpoints then leave them out; a digest detects other values in a resume.
        files: content by name of further files for each checkpoint folder, such as the model's config.json. They let
            other programs read the weights there, and training does not read them.
        plan: how ranks divide the model (--parallel.tp, --parallel.ep): styles of transformers by the name of a module
            or parameter, with ``*`` for the number of a layer (default: the model's own `tp_plan` and `ep_plan`).
        by_part: takes a `SequencePart`, lets the model exchange what the parts need of each other, and returns a
            function as `loss` over this part of the sequences of a whole batch, or it and one as `metrics`
            (--parallel.cp).
        prepare: called once before training, with the device and the dtype of forward, to choose kernels. Returns a
            line to show.
    """

    model: nn.Module
    loss: Loss
    train_data: Dataset[Any]
    heldout_data: Dataset[Any] | None = None
    optimizer: Optimizer | None = None
    schedule: Callable[[int], float] | Callable[[int, int], float] | None = None
    metrics: Metrics | None = None
    metric_objects: Mapping[str, Any] = field(default_factory=dict)
    collate: Callable[[list[Any]], Any] | None = None
    nominal_weight: float = 1.0
    unit: str = "samples"
    data_id: str = ""
    remakes_frozen: bool = False
    files: Mapping[str, bytes] = field(default_factory=dict)
    plan: Mapping[str, str] = field(default_factory=dict)
    by_part: Callable[[SequencePart], Loss | tuple[Loss, Metrics]] | None = None
    prepare: Callable[[torch.device, torch.dtype], str] | None = None


def load_task_function(spec: str) -> TaskFunction:
    """Load the function that `spec` names: a short name, ``file.py:function`` or ``module:function``.

    Errors: TaskError: there is no such function; the message lists the existing ones.
    """
    target = NAMED.get(spec, spec)
    place, colon, function_name = target.rpartition(":")
    if not colon or not place or not function_name:
        is_file = spec.endswith(".py")
        raise TaskError(
            f"there is no task {spec!r}",
            expected=f"one of {', '.join(sorted(NAMED))}, or file.py:function, or module:function",
            next_step=f"name the function that makes the task: --task {spec}:FUNCTION" if is_file else None,
            everywhere=True,
        )
    return load(target, TaskError, "a function that returns a hvdtrain.Task")  # type: ignore[no-any-return]


def import_library(name: str, user: str, extra: str) -> Any:
    """Import a library of one of our extras, for `user`. Errors: TaskError: it is not installed."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise TaskError(f"{user} needs the {name} library", next_step=f'pip install "hvdtrain[{extra}]"') from error
