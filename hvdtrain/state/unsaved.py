"""State of an optimizer that checkpoints do not contain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_NUMBERS = (bool, int, float, str)


class UnsavedValues:
    """Finds what an optimizer changes in training outside of its `state` and of the numbers in its groups.

    `TrainState` saves only those. An optimizer that counts its steps in an attribute resumes from step 0.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        # Attributes of torch's base class, fused optimizers and schedulers are not state: hooks, what was checked.
        self._known = vars(torch.optim.SGD([nn.Parameter(torch.empty(0))], fused=True)).keys() | {"_opt_called"}
        self._start = self._marks()

    def names(self) -> list[str]:
        """Return the names of the values that have changed."""
        return sorted(name for name, mark in self._marks().items() if mark != self._start.get(name))

    def _marks(self) -> dict[str, Any]:
        found = {name: value for name, value in vars(self._optimizer).items() if name not in self._known}
        for number, group in enumerate(self._optimizer.param_groups):
            kept = {k: v for k, v in group.items() if k not in ("params", "lr") and not isinstance(v, _NUMBERS)}
            found |= {f"{name} of group {number}": value for name, value in kept.items()}
        return {name: self._mark(value) for name, value in found.items()}

    def _mark(self, value: Any) -> Any:
        """Return what differs after a change."""
        if isinstance(value, Tensor):
            return id(value), value._version
        if isinstance(value, Optimizer):  # a wrapped one
            return None if value.state is self._optimizer.state else self._mark(value.state)
        if isinstance(value, Mapping):
            return [self._mark(each) for each in value.values()]
        if isinstance(value, (list, tuple)):
            return [self._mark(each) for each in value]
        return value if isinstance(value, _NUMBERS) else None
