"""State of callbacks: tensors and JSON values, in checkpoints and commits next to those of the model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from hvdtrain.errors import TaskError
from hvdtrain.state.divided import is_divided, local, place_of, take_rows
from hvdtrain.state.pieces import Key, Place, StateDict, Whole, lazily

GROUP = "callbacks"  # the group of their tensors, and the key of their values

FindParameter = Callable[[str], "Tensor | None"]


class Stateful(Protocol):
    """Something with state to save."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return tensors, and values that JSON supports, by name."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from such a state."""


def extra_state(
    extras: Mapping[str, Stateful], parameter: FindParameter
) -> tuple[dict[str, Tensor], dict[str, Any], dict[Key, Place]]:
    """Return the tensors of `extras` by ``extra/name``, their values by extra and name, and the places of pieces.

    Errors: TaskError if a value cannot be saved, or a divided tensor has no parameter of the model with its name.
    """
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    places: dict[Key, Place] = {}
    for extra, own in extras.items():
        for name, value in own.state_dict().items():
            key = f"{extra}/{name}"
            if not isinstance(value, Tensor):
                values.setdefault(extra, {})[name] = _checked(key, value)
                continue
            if is_divided(value) != is_divided(parameter(name)):
                raise TaskError(
                    f"the state of {key} cannot be saved",
                    expected="tensors with the name of a divided parameter are divided like it, all others are not",
                    found=type(value).__name__,
                    next_step="give the tensor another name, or return one like the parameter",
                )
            tensors[key] = local(value)
            if is_divided(value):
                places[GROUP, key] = place_of(value)
    return tensors, values, places


def load_extras(extras: Mapping[str, Stateful], state: StateDict, parameter: FindParameter) -> None:
    """Give each of `extras` its part of a state, with copies of tensors. One without a part keeps what it has."""
    every: dict[str, dict[str, Any]] = {
        extra: dict(values) for extra, values in state.values.get(GROUP, {}).items() if extra in extras
    }
    tensors = state.tensors.get(GROUP, {})
    for key in tensors:
        extra, _, name = key.partition("/")
        if extra in extras:
            every.setdefault(extra, {})[name] = _as_held(lazily(tensors, key), parameter(name))
    for extra, own in every.items():
        extras[extra].load_state_dict(own)


def unused(extras: Mapping[str, Stateful], state: StateDict) -> list[str]:
    """Return the names that have a part in `state`, but are not among `extras`."""
    stored = {key.partition("/")[0] for key in state.tensors.get(GROUP, {})} | set(state.values.get(GROUP, {}))
    return sorted(stored - extras.keys())


def _as_held(tensor: Tensor | Whole, parameter: Tensor | None) -> Tensor:
    """Return a copy, on the device of the parameter with its name, and divided like it."""
    if parameter is None:
        return tensor[...].clone()
    if not is_divided(parameter):
        return tensor[...].to(parameter.device, copy=True)
    is_own = tuple(tensor.shape) == local(parameter).shape
    return take_rows(tensor[...].clone() if is_own else tensor, parameter)


def _checked(key: str, value: Any) -> Any:
    try:
        if json.loads(json.dumps(value)) == value or value != value:  # NaN is not equal to itself
            return value
        found = f"{value!r}, which JSON changes"
    except (TypeError, ValueError):
        found = type(value).__name__
    raise TaskError(
        f"the state of {key} cannot be saved",
        expected="tensors, and numbers, strings, lists and dicts as JSON has them",
        found=found,
    )
