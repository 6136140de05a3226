"""The contract of an engine: an optimizer and the exchange of its gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from hvdtrain.exchange.norms import norm, squared_norm
from hvdtrain.exchange.residuals import Residuals
from hvdtrain.state.exchange_state import Owned
from hvdtrain.state.pieces import Place

if TYPE_CHECKING:
    from hvdtrain.engine.stage import Stage

Loss = tuple[Tensor, "Tensor | float"]
"""The sum of the losses of a micro-batch, and its weight."""


class Engine(Protocol):
    """An optimizer and the exchange of its gradients; the defaults are those of an engine without an exchange.

    Attributes:
        optimizer: of the model.
        compression: of the exchange; a name in `compression.table`.
        undecided: whether the compression will be chosen later, by the measured cost of steps.
        residuals: what the exchange remembers.
        stage: of this rank in a pipeline; None without.
        uniform_passes: whether a forward pass is collective, so that all ranks must run equally many, also in an
            evaluation. Ranks with fewer micro-batches repeat one, with weight 0.
    """

    optimizer: Optimizer
    compression: str = "none"
    undecided: bool = False
    residuals: Residuals = Residuals()
    stage: Stage | None = None
    uniform_passes: bool = False

    def begin(self, micro_batches: int) -> None:
        """Clear gradients; this rank then runs backward `micro_batches` times, 0 if it is idle.

        Those of weight 0 are included.
        """

    def forward(self, call: Callable[[], Loss]) -> Loss:
        """Run a forward pass of the step: return what `call` returns. `backward` of its loss follows."""
        return call()

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`, a scalar; the last one of a step starts the exchange."""

    def accumulate(self, passes: Iterable[Callable[[], Callable[[], None]]]) -> None:
        """Run the passes of a step. Each is a function that runs a forward pass, and returns what runs its backward."""
        for forward in passes:
            forward()()

    def finish(self) -> list[Tensor]:
        """Wait until every gradient is the sum over ranks and micro-batches. Collective: yes.

        Returns the gradients that this rank's optimizer uses; the caller may scale them in place. A parameter that this
        rank has not used, and another rank may have, has a gradient, too.
        """

    def unused(self) -> list[bool]:
        """Return for each trained parameter whether this rank has not used it in this step's passes, before `finish`.

        Equally many on all ranks. Empty if parameters without a gradient have none after `finish` anyway, or if the
        engine gives all a gradient.
        """
        return []

    def leave_out(self, numbers: Sequence[int]) -> None:
        """Remove the gradients of parameters that no rank has used, so that `step` leaves these as they are.

        Those that get a residual of an earlier step stay. Collective: yes.

        Args:
            numbers: positions in the result of `unused`.
        """
        return

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the L2 norm of the whole gradient from those of `finish`, on the device. Collective: yes.

        It is equal on all ranks.
        """
        return norm(squared_norm(gradients))

    def close(self) -> None:
        """Remove all hooks from the parameters."""
        return

    def step(self) -> None:
        """Run the optimizer with the gradients of `finish`."""
        self.optimizer.step()

    def complete(self) -> None:
        """Wait until the parameters of the model are those of the last step; all ranks have started to send them."""
        return

    @property
    def replayable(self) -> bool:
        """Whether a rank can repeat its passes of the last step alone."""
        return True

    def covered(self, step: int) -> range:
        """Return the steps that the model's parameters have gained with step `step`, the last one."""
        return range(step, step + 1)

    def owned(self) -> Mapping[str, Owned] | None:
        """Return the part of each parameter that this rank's optimizer updates, by name; None if it updates all."""
        return None

    @property
    def in_pieces(self) -> bool:
        """Whether ranks have different parts of the state, so that losing one loses state."""
        return self.owned() is not None

    def commit(self, *, applied: bool) -> None:
        """End the step: keep the new residuals of the compression if it was applied, else the old ones."""
        self.residuals.commit(applied=applied)

    def rescale(self, factor: float) -> None:
        """Multiply the residuals by `factor`, as the caller does with all later gradients."""
        self.residuals.rescale(factor)

    def synchronize_state(self) -> None:
        """Make the exchange's state equal on all ranks, so that one rank can save it. Collective: yes."""
        self.residuals.synchronize_state()

    def synchronized_state(self) -> dict[str, Tensor]:
        """Return the tensors that `synchronize_state` would make, without changing the state. Collective: yes.

        They are valid until the next step.
        """
        return self.residuals.synchronized_state()

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the exchange's state, tensors and plain values; equal on all ranks after `synchronize_state`."""
        return self.residuals.state_dict()

    def state_place(self, key: str) -> Place | None:
        """Return the place of a tensor of the state; None if it is whole, and equal on all ranks."""
        return self.residuals.state_place(key)

    def residual_ranks(self, key: str) -> Sequence[int]:
        """Return the ranks that each have a residual of their own, where this rank has one; none if all are equal."""
        return self.residuals.residual_ranks(key)

    def keeps(self, key: str) -> bool:
        """Return whether this rank has use for a tensor of the exchange's state."""
        return self.residuals.keeps(key)

    def load_state_dict(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Load the exchange's state."""
        self.residuals.load_state_dict(tensors, values)

    def parameters_by_collective(self) -> dict[str, list[str]]:
        """Return the names of the parameters in each collective, by the prefix of its name."""
        return {}

    def copies(self) -> Mapping[str, int]:
        """Return how many ranks sum the gradient of a parameter, by name, where it is not all."""
        return {}

    def buffers(self) -> list[Tensor]:
        """Return the memory of the exchange, without the gradients."""
        return []
