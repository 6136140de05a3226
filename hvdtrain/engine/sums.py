"""The contract of what sums gradients for an engine: over ranks, and the passes of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from hvdtrain.data.tree import Positions
from hvdtrain.engine.schedule import Schedule
from hvdtrain.exchange.in_order import Leaves
from hvdtrain.exchange.norms import norm, squared_norm, squares_by_row
from hvdtrain.exchange.residuals import Residuals
from hvdtrain.state.exchange_state import Owned

Loss = tuple[Tensor, "Tensor | float"]
"""The sum of the losses of a micro-batch, and its weight."""


class Sums:
    """Sums gradients; the defaults are those of one rank. For methods without a text see `Engine`.

    Attributes:
        schedule: of the engine, which sets it: how many passes of the step have begun, and are left.
        positions: of the micro-batches of the step, set before it begins where the order of sums follows from them.
        compression: of the exchange.
        undecided: whether it will be chosen later.
        residuals: what the exchange remembers.
        uniform_passes: whether a forward pass is collective.
        leaves: what adds the passes in the order of their positions; None if autograd adds them.
    """

    schedule: Schedule
    positions: Positions | None = None
    compression: str = "none"
    undecided: bool = False
    residuals: Residuals = Residuals()
    uniform_passes: bool = False
    leaves: Leaves | None = None

    def refresh(self) -> None:
        """Look for parameters that were added, frozen or freed since the last step. Collective: yes, if there are some.

        Errors:
            TaskError: they cannot be summed.
            LaunchError: the ranks train different parameters; on every rank.
        """

    def begin(self) -> None:
        """Start a step; the optimizer's gradients are cleared."""

    def forward(self, call: Callable[[], Loss]) -> Loss:
        """Run a forward pass."""
        return call()

    def end_pass(self) -> None:
        """End a backward pass: another one follows, or none. Collective: yes, where each pass is summed."""

    def backward(self, call: Callable[[], None]) -> None:
        """Run a backward pass; where it is the last one, start the exchange."""
        call()

    def finish(self) -> list[Tensor]:
        """Wait for the sums, and return them. Collective: yes."""
        raise NotImplementedError

    def unused(self) -> list[bool]:  # noqa: D102
        return []

    def leave_out(self, numbers: Sequence[int]) -> None:  # noqa: D102
        return

    def norm(self, gradients: list[Tensor]) -> Tensor:  # noqa: D102
        return norm(squared_norm(gradients))

    def spread(self) -> None:
        """Start to send what this rank's optimizer has updated. Collective: yes, if the update is divided."""

    def complete(self) -> None:  # noqa: D102
        return

    def owned(self) -> Mapping[str, Owned] | None:  # noqa: D102
        return None

    def parameters_by_collective(self) -> dict[str, list[str]]:
        """Return the names of the parameters in each collective, by the prefix of its name."""
        return {}

    def copies(self) -> Mapping[str, int]:
        """Return how many ranks sum the gradient of a parameter, by name, where it is not all."""
        return {}

    def buffers(self) -> list[Tensor]:  # noqa: D102
        return []

    def values(self) -> dict[str, Any]:
        """Return plain values of a checkpoint, besides those of the residuals."""
        return {}

    def before_load(self, values: Mapping[str, Any]) -> None:
        """Take the plain values of a checkpoint: the model's parameters are loaded, and the residuals come next."""

    def close(self) -> None:
        """Remove all hooks from the parameters."""


def norm_in_order(parameters: Iterable[Tensor]) -> Tensor:
    """Return the norm of the gradients of parameters that this rank has; its bits depend on nothing else."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return norm(squares_by_row([parameter.grad for parameter in trained], trained).sum())
