"""The backward passes of a step: which one is the last, and which gradients it has finished."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from hvdtrain.errors import CallOrderError
from hvdtrain.exchange.buckets import Named


class BackwardPasses:
    """Recognizes the last backward pass of a step: its gradients are exchanged.

    Args:
        count: backward passes per step, counted by the gradients that arrive: the parameter that was reached most often
            gives the number of the pass. 0 if the caller sets `last` before the last pass.

    Attributes:
        last: whether the current or next pass is the last one. The caller clears it when no further pass is expected.
    """

    def __init__(self, count: int = 0) -> None:
        self.count = count
        self.begin()

    def begin(self) -> None:
        """Start a step."""
        self._by_name: dict[str, int] = {}
        self._most = 0
        self.last = self.count == 1

    def record_gradient(self, name: str) -> bool:
        """Record that a parameter got a gradient; return whether it is from the last pass."""
        if self.count > 1:
            number = self._by_name[name] = self._by_name.get(name, 0) + 1
            if number > self._most:
                self._most = number
                self.last = number >= self.count
        return self.last


class SentGradient(Tensor):
    """A placeholder for a gradient that was sent to its owner: a shape without values. Operations on it are errors."""

    @staticmethod
    def __new__(cls, parameter: Tensor, name: str) -> SentGradient:
        """Make one for a parameter."""
        like = parameter.detach()
        made: SentGradient = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        return made

    def __init__(self, parameter: Tensor, name: str) -> None:
        self.of = name

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return a text without values."""
        return f"SentGradient({self.of})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse every operation."""
        name = next(value.of for value in tree_leaves((args, kwargs)) if isinstance(value, cls))
        raise CallOrderError(
            f"the gradient of {name} is not on this rank: the optimizer is divided, so backward sends it to its owner",
            expected="gradients that only the optimizer uses",
            found=f"{func} on {name}.grad",
            next_step="to clip: optimizer.clip_grad_norm_(max_norm) between backward and step. Before each step's first"
            " backward: optimizer.zero_grad(). For several backward passes a step: backward_passes_per_step",
        )


class FinishedGradients(dict[str, tuple[Tensor | None, int]]):
    """The gradients that the last backward pass has finished, in order; by parameter, each with its version.

    Args:
        detect_changes: whether they stay the parameters' gradients during the exchange, so that a program can change
            them.
    """

    def __init__(self, *, detect_changes: bool) -> None:
        super().__init__()
        self._detect_changes = detect_changes

    def add(self, name: str, gradient: Tensor | None) -> None:
        """Add the gradient of a parameter."""
        kept = gradient if self._detect_changes else None
        self[name] = (kept, 0 if kept is None else _version(kept))

    def check_unchanged(self, named: Named) -> None:
        """Check that no gradient has changed since it was added.

        Errors:
            CallOrderError: one was written to or replaced.
        """
        for name, parameter in named:
            gradient, version = self.get(name, (None, 0))
            if gradient is not None and (parameter.grad is not gradient or _version(gradient) != version):
                raise CallOrderError(
                    f"the gradient of {name} was changed after backward, during its exchange",
                    next_step="call optimizer.synchronize() before you clip, scale or clear gradients, then"
                    " optimizer.step() within optimizer.skip_synchronize()",
                )


def _version(gradient: Tensor) -> int:
    """Return a number that grows with each write; 0 for a part of a buffer, because parts share one number."""
    alone = not gradient.is_sparse and gradient.untyped_storage().nbytes() == gradient.nbytes
    return gradient._version if alone else 0
