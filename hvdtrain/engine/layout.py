"""What a rank holds of each parameter of a model, which of it its optimizer updates, and which ranks have copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

from hvdtrain.exchange.active_buckets import BetweenCopies
from hvdtrain.exchange.at_owners import AtOwners
from hvdtrain.state.exchange_state import Owned

Exchange = BetweenCopies | AtOwners
"""What sums the gradients of what this rank holds with those of the other copies."""


class Layout:
    """What this rank holds.

    Attributes:
        divides_model: whether ranks hold parts of the model, so that a pass is collective.
        parameters: of the model, those that the optimizer was made for; by name.
        held: this rank's part of each, in the memory of the model.
        owned: what this rank's optimizer updates of each.
        exchanges: of each trained parameter that this rank holds; None if no other rank has a copy.
        every: exchange that this rank has a part in.
    """

    divides_model: bool = False
    parameters: dict[str, nn.Parameter]
    held: Mapping[str, Owned]
    owned: Mapping[str, Owned]
    exchanges: Mapping[str, Exchange | None]
    every: Sequence[Exchange]

    def find_added(self, complete: Callable[[], None]) -> bool:
        """Take parameters that were added to the optimizer; return whether there are some. Collective: yes, if so.

        `complete` waits for the parameters of the last step.
        """
        return False

    def use_trained(self) -> None:
        """Set `exchanges` for the parameters that are trained now. Collective: yes."""

    def trained_names(self) -> list[str]:
        """Return the names of all trained parameters, equal on all ranks."""
        raise NotImplementedError

    def leads(self, name: str) -> bool:
        """Return whether this rank is the first one of those with copies of a trained parameter."""
        raise NotImplementedError

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the norm of the whole gradient from those of this rank's optimizer. Collective: yes."""
        raise NotImplementedError

    def copies(self) -> Mapping[str, int]:
        """Return how many ranks sum the gradient of a parameter, by name, where it is not all."""
        return {}

    def close(self) -> None:
        """Give the optimizer the parameters of the model again, where this rank holds them whole."""
