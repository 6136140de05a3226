"""What exchanges with a compression remember: the part of gradients that they have not delivered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from hvdtrain.compression.feedback import RESIDUAL
from hvdtrain.state.exchange_state import ROUNDED
from hvdtrain.state.pieces import Place


class Residuals:
    """The residuals of an engine, as a checkpoint has them; these methods are those of `Engine`."""

    def commit(self, *, applied: bool) -> None:
        """End the step: keep the new residuals if it was applied, else the old ones."""

    def rescale(self, factor: float) -> None:
        """Multiply all residuals by `factor`, as the caller does with all later gradients."""

    def synchronize_state(self) -> None:
        """Make them equal on all ranks that share them, so that one rank can save them. Collective: yes."""

    def synchronized_state(self) -> dict[str, Tensor]:
        """Return them as they would be then. Collective: yes."""
        return self.state_dict()[0]

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors, and plain values."""
        return {}, {"plan": None, "ranks": 1}

    def state_place(self, key: str) -> Place | None:
        """Return the place of one; None if it is whole, and equal on all ranks."""
        return None

    def residual_ranks(self, key: str) -> Sequence[int]:
        """Return the ranks that each have one of their own; none if all are equal."""
        return ()

    def keeps(self, key: str) -> bool:
        """Return whether this rank has use for a tensor of a checkpoint's exchange."""
        return not key.endswith(ROUNDED)

    def load_state_dict(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Load them."""


class Undelivered(Residuals):
    """Residuals of an earlier exchange with a compression; the next step without one adds them to its gradients.

    Args:
        delivers: returns the names of parameters; a step delivers their residuals.

    Attributes:
        sums: over all ranks, by parameter.
    """

    def __init__(self, delivers: Callable[[], set[str]]) -> None:
        self._delivers = delivers
        self.sums: dict[str, Tensor] = {}

    def commit(self, *, applied: bool) -> None:
        """Forget the delivered ones, if the step was applied; those of frozen parameters were not delivered."""
        if applied and self.sums:
            delivered = self._delivers()
            self.sums = {name: tensor for name, tensor in self.sums.items() if name not in delivered}

    def rescale(self, factor: float) -> None:  # noqa: D102
        for residual in self.sums.values():
            residual.mul_(factor)

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return those that are not delivered yet."""
        return {residual_key(name): t for name, t in self.sums.items()}, {"plan": None, "ranks": 1}

    def load_state_dict(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:  # noqa: D102
        ranks = int(values["ranks"])
        self.sums = {k.rpartition("/")[0]: t * ranks for k, t in tensors.items() if is_residual(k)}


def leave_out(parameter: Tensor, *, may_be_residual: bool) -> None:
    """Remove a gradient, unless a residual is its sum."""
    if not (may_be_residual and parameter.grad is not None and bool(parameter.grad.any())):
        parameter.grad = None


def residual_key(parameter: str) -> str:
    """Return the key of a parameter's residual."""
    return f"{parameter}/{RESIDUAL}"


def is_residual(key: str) -> bool:
    """Whether a key in the state of compressors is that of a residual."""
    return key.endswith(f"/{RESIDUAL}")
