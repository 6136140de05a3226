"""The contract of a task, and how one is found by name. Imports no torch of its own."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.errors import TaskError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.utils.data import Dataset

NAMED = {"language_model": "hvdtrain.task.language_model:language_model"}
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
    module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    function = getattr(module, function_name, None)
    if not callable(function):
        own = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
        raise TaskError(
            f"{place} has no function {function_name!r}",
            expected="a function that returns a hvdtrain.Task",
            found=", ".join(own) or "no function at all",
        )
    return function  # type: ignore[no-any-return]


def _import_module(name: str) -> Any:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and name.startswith(error.name):
            raise TaskError(
                f"there is no module {name!r} to take the task from",
                next_step="give file.py:function for a file, or install the module into this environment",
            ) from error
        raise


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise TaskError(f"there is no file {str(path)!r} to take the task from", found=f"working in {Path.cwd()}")
    # Its own folder comes first on the path, as it would for `python file.py`: it may import its neighbours, and
    # loader workers import it again by its name.
    sys.path.insert(0, str(path.resolve().parent))
    if path.stem not in sys.modules and path.stem.isidentifier():
        module = importlib.import_module(path.stem)
        if module.__file__ and Path(module.__file__).samefile(path):
            return module
    spec = importlib.util.spec_from_file_location(f"task_{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
