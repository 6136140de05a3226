"""The sums of one rank: no exchange."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from hvdtrain.engine.sums import Sums, norm_in_order
from hvdtrain.exchange.active_buckets import DetachedState
from hvdtrain.exchange.buckets import as_gradient
from hvdtrain.exchange.in_order import Leaves
from hvdtrain.exchange.residuals import Residuals, residual_key


class OneRank(Sums, Residuals):
    """One rank: nothing to exchange, except residuals that several ranks have left.

    Args:
        optimized: returns the optimizer's parameters with their names; called before each step.
        leaves: add the passes in the order of their positions; None to let autograd add them.
    """

    def __init__(self, optimized: Callable[[], list[tuple[str, nn.Parameter]]], leaves: Leaves | None = None) -> None:
        self.residuals, self.leaves = self, leaves
        self._optimized, self._parameters = optimized, optimized()
        self._residuals = DetachedState({}, 1)
        self._delivered: list[str] = []
        self._values: Mapping[str, Any] = {"plan": None, "ranks": 1}

    def refresh(self) -> None:
        """Look for parameters that were added. Errors: TaskError: one is from outside the model."""
        self._parameters = self._optimized()

    def begin(self) -> None:  # noqa: D102
        if self.leaves is not None:
            self.leaves.begin(self.positions, self.schedule.left)

    def backward(self, call: Callable[[], None]) -> None:  # noqa: D102
        call()
        if self.leaves is not None:
            self.leaves.take(self._parameters)

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the norm of the gradients."""
        return super().norm(gradients) if self.leaves is None else norm_in_order(p for _, p in self._parameters)

    def finish(self) -> list[Tensor]:
        """Add the residuals to the gradients."""
        if self.leaves is not None:
            self.leaves.give(self._parameters)
        self._delivered = []
        gradients = [p.grad for _, p in self._parameters if p.requires_grad and p.grad is not None]
        if not self._residuals.tensors and not [gradient for gradient in gradients if gradient.is_sparse]:
            return gradients
        gradients = []
        for name, parameter in self._parameters:
            if not parameter.requires_grad:
                continue
            if self._residuals.has_residual(name) and (parameter.grad is None or not parameter.grad.is_sparse):
                self._delivered.append(key := residual_key(name))
                residual = self._residuals.tensors[key].to(parameter.device) * self._residuals.ranks
                residual = as_gradient(residual, parameter)
                parameter.grad = residual if parameter.grad is None else parameter.grad.add_(residual)
            if parameter.grad is None:
                continue
            if parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
                gradients.append(parameter.grad._values())
            else:
                gradients.append(parameter.grad)
        return gradients

    def commit(self, *, applied: bool) -> None:
        """Drop the residuals that were added, if the step was applied."""
        if applied and self._delivered:
            self._residuals = self._residuals.without_keys(self._delivered)

    def rescale(self, factor: float) -> None:  # noqa: D102
        self._residuals.rescale(factor)

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the remaining residuals, for a later world size above 1."""
        return dict(self._residuals.tensors), dict(self._values)

    def load_state_dict(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Load residuals of several ranks; they are added to the next gradients."""
        kept = {name: tensor.clone() for name, tensor in tensors.items()}
        self._residuals = DetachedState(kept, int(values["ranks"]))
        self._values = values
