"""The contract of an engine: an optimizer and the exchange of its gradients, as the trainer sees them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer


class Engine(Protocol):
    """An optimizer and the exchange of its gradients.

    Attributes:
        optimizer: the one that was given.
        compression: what travels: a name of `compression.table`.
        undecided: whether it is still to be chosen, by what steps without it cost.
    """

    optimizer: Optimizer
    compression: str
    undecided: bool

    def begin(self, micro_batches: int) -> None:
        """Clear gradients; this rank is about to run backward `micro_batches` times, 0 if it idles."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`, a scalar; the last one of a step starts the exchange."""
        ...

    def finish(self) -> list[Tensor]:
        """Wait until every gradient is the sum over ranks and micro-batches. Collective: yes.

        Returns all gradients, equal on all ranks, to take the norm of and to scale in place. That of a parameter
        which nobody used is zero at every size.
        """
        ...

    def close(self) -> None:
        """Let go of the parameters."""
        ...

    def step(self) -> None:
        """Let the optimizer follow the gradients that `finish` left."""
        ...

    def commit(self, *, applied: bool) -> None:
        """The step is over: keep what compression carries to the next one, or forget it if it was not applied."""
        ...

    def rescale(self, factor: float) -> None:
        """Gradients are multiplied by `factor` from now on, and so is what compression carries to the next step."""
        ...

    def synchronize_state(self) -> None:
        """Make the exchange's state the same on all ranks, so that one can save it. Collective: yes."""
        ...

    def synchronized_state(self) -> dict[str, Tensor]:
        """The tensors as `synchronize_state` would make them, which stay as they are. Collective: yes.

        To be read before the next step.
        """
        ...

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The exchange's state, tensors and plain values; equal on all ranks after `synchronize_state`."""
        ...

    def load_state_dict(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Take over the exchange's state."""
        ...

    def carried(self) -> dict[str, list[str]]:
        """Names of the parameters whose gradients each collective carries, by what its name begins with."""
        ...

    def buffers(self) -> list[Tensor]:
        """The memory that the exchange takes beside the gradients."""
        ...
