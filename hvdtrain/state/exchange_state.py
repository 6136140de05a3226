"""The state of the exchange of gradients, and the part of the parameters that it gives to this rank's optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from hvdtrain.state.pieces import Place, W

MASTER = "/master"
"""Ends the key of the exact values of a parameter's owned part, where the model's are rounded."""
ROUNDED = "/rounded"
"""Ends the key of the values that a parameter has in training, where those of the saved model are exact."""


@dataclass(frozen=True)
class Owned:
    """The part of a model's parameter that this rank's optimizer updates."""

    parameter: nn.Parameter | None  # of the optimizer; None if other ranks update all of it
    place: Place | None = None  # of this part; None for the whole parameter, on every rank
    owners: tuple[int, ...] = ()  # ranks that update a part of it; empty for all ranks

    def place_of(self, value: Tensor) -> Place | None:
        """Return the place of a tensor in the optimizer's state of this part."""
        if self.place is None or self.parameter is None:
            return None
        if value.shape == self.parameter.shape:
            return self.place
        return Place(tuple(value.shape), (0,) * value.dim(), self.owners)

    def cut(self, value: W) -> Tensor | W:
        """Return this part of a tensor in the optimizer's state of the whole parameter."""
        if self.place is None or self.parameter is None or tuple(value.shape) != self.place.shape:
            return value
        return self.place.cut(value, self.parameter.shape)


class Exchange(Protocol):
    """State between exchanges of gradients: the bucket plan, and the residuals of compression."""

    def complete(self) -> None:
        """Wait until the model's parameters are those of the last step."""
        return

    def owned(self) -> Mapping[str, Owned] | None:
        """Return the owned part of each parameter in the optimizer, by name; None if ranks own all of all."""

    @property
    def in_pieces(self) -> bool:
        """Whether ranks have different parts of the state, so that losing one loses state."""

    def keeps(self, key: str) -> bool:
        """Return whether this rank has use for a tensor of the state."""

    def synchronized_state(self) -> dict[str, Tensor]:
        """Return the tensors of a state that is equal on all ranks, without changing any. Collective: yes.

        They are valid until the next step.
        """

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors by name, and plain values."""

    def state_place(self, key: str) -> Place | None:
        """Return the place of a tensor of the state; None if it is whole, and equal on all ranks."""

    def load_state_dict(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Load them, possibly without a copy."""


class ExchangeState(Exchange):
    """The state of an exchange between two rounds, after its buckets were freed; it has no ranks to wait for."""

    in_pieces = False

    def __init__(self, exchange: Exchange) -> None:
        self._state = exchange.state_dict()
        self._places = {key: exchange.state_place(key) for key in self._state[0]}
        self._owned, self.in_pieces = exchange.owned(), exchange.in_pieces

    def owned(self) -> Mapping[str, Owned] | None:  # noqa: D102
        return self._owned

    def keeps(self, key: str) -> bool:  # noqa: D102
        return True

    def synchronized_state(self) -> dict[str, Tensor]:  # noqa: D102
        return self._state[0]

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:  # noqa: D102
        return self._state

    def state_place(self, key: str) -> Place | None:  # noqa: D102
        return self._places.get(key)

    def load_state_dict(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:  # noqa: D102
        self._state = dict(tensors), dict(values)
