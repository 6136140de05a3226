"""Gradients that the last backward pass of a step has finished: in which order, and whether one was changed since."""

from __future__ import annotations

from torch import Tensor

from hvdtrain.errors import CallOrderError
from hvdtrain.exchange.buckets import Named


class Arrivals:
    """Gradients that are on their way to the other ranks.

    Args:
        stay: whether they stay the parameters' gradients meanwhile, where a program can change them.
    """

    def __init__(self, *, stay: bool) -> None:
        self._stay = stay
        self._came: dict[str, tuple[Tensor | None, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._came)

    @property
    def names(self) -> list[str]:
        """Of the parameters, in the order in which backward finished them."""
        return list(self._came)

    def note(self, name: str, gradient: Tensor | None) -> None:
        """The gradient of a parameter has come."""
        self._came[name] = (gradient, _version(gradient)) if self._stay and gradient is not None else (None, 0)

    def clear(self) -> None:
        """Expect those of another step."""
        self._came.clear()

    def refuse_changed(self, named: Named) -> None:
        """See that those which came are still what they were.

        Errors:
            CallOrderError: one of them was written to, or is another tensor.
        """
        for name, parameter in named:
            gradient, version = self._came.get(name, (None, 0))
            if gradient is not None and (parameter.grad is not gradient or _version(gradient) != version):
                raise CallOrderError(
                    f"the gradient of {name} was changed after backward, when it was on its way to the other ranks",
                    next_step="call optimizer.synchronize() before gradients are clipped, scaled or cleared, then"
                    " optimizer.step() within optimizer.skip_synchronize()",
                )


def _version(gradient: Tensor) -> int:
    """A number that grows when it is written to; 0 for part of a buffer, whose parts share theirs."""
    alone = not gradient.is_sparse and gradient.untyped_storage().nbytes() == gradient.nbytes
    return gradient._version if alone else 0
