"""The backward passes of a step: which one is the last, and which gradients it has finished."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from hvdtrain.errors import CallOrderError
from hvdtrain.exchange.buckets import Named
from hvdtrain.host_copy import HostCopy

Function = TypeVar("Function", bound=Callable[..., Any])

_SAMPLED = 8
"""Elements of a gradient that are compared."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by their bytes: equal bits are equal, also of NaN."""


class BackwardPasses:
    """Recognizes the last backward pass of a step: its gradients are exchanged.

    Args:
        count: backward passes per step, counted by the gradients that arrive: the parameter that was reached most often
            gives the number of the pass. 0 if the caller sets `last` before the last pass.

    Attributes:
        last: whether the current or next pass is the last one. The caller clears it when no further pass is expected.
        number: of the current pass, if there are several; 0 before the first gradient.
    """

    def __init__(self, count: int = 0) -> None:
        self.count = count
        self.begin()

    def begin(self) -> None:
        """Start a step."""
        self._by_name: dict[str, int] = {}
        self.number = 0
        self.last = self.count == 1

    def record_gradient(self, name: str) -> bool:
        """Record that a parameter got a gradient; return whether it is from the last pass."""
        if self.count > 1:
            number = self._by_name[name] = self._by_name.get(name, 0) + 1
            if number > self.number:
                self.number = number
                self.last = number >= self.count
        return self.last

    def begins_another(self, name: str) -> bool:
        """Return whether a further gradient of a parameter would be the first one of another pass of the step."""
        return 0 < self._by_name.get(name, 0) == self.number < self.count


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

    ``p.grad.data`` changes without a new version. So some elements of each are kept at the end of the pass: a change of
    most elements, such as scaling or clamping, is seen without reading all. On a GPU it is known at the end of the next
    step, as the host does not wait for the device.

    Args:
        detect_changes: whether they stay the parameters' gradients during the exchange, so that a program can change
            them.
    """

    def __init__(self, *, detect_changes: bool) -> None:
        super().__init__()
        self._detect_changes = detect_changes
        self._unseen: list[str] = []  # of the backward pass that runs
        self._samples: list[tuple[list[str], Tensor]] = []
        self._compared: list[HostCopy] = []  # whether something has changed, on the way from a device

    def add(self, name: str, gradient: Tensor | None) -> None:
        """Add the gradient of a parameter. Errors: CallOrderError: it was added before."""
        if name in self:
            raise second_gradient(name)
        kept = gradient if self._detect_changes else None
        self[name] = (kept, 0 if kept is None else _version(kept))
        if kept is not None and type(kept) is Tensor and not kept.is_sparse and kept.numel():
            if not self._unseen:
                Variable._execution_engine.queue_callback(self._sample)
            self._unseen.append(name)

    def clear(self) -> None:
        """Forget all gradients."""
        super().clear()
        self._unseen, self._samples = [], []

    def _sample(self) -> None:
        """Keep some elements of each gradient of the backward pass, at its end."""
        groups: dict[tuple[torch.device, torch.dtype], list[str]] = {}
        for name in self._unseen:
            gradient = self[name][0]
            assert gradient is not None
            groups.setdefault((gradient.device, gradient.dtype), []).append(name)
        self._unseen = []
        self._samples += [(names, self._elements(names)) for names in groups.values()]

    def _elements(self, names: Sequence[str]) -> Tensor:
        """Return the bits of some elements of the gradients as they are now, in one tensor."""
        elements = torch.cat([_some_elements(self[name][0]) for name in names])  # type: ignore[arg-type]
        real = torch.view_as_real(elements) if elements.is_complex() else elements
        return real.view(_INTEGERS[real.element_size()])

    def check_unchanged(self, named: Named) -> None:
        """Check that no gradient has changed since it was added.

        Errors: CallOrderError: one was written to or replaced.
        """
        for name, parameter in named:
            gradient, version = self.get(name, (None, 0))
            if gradient is not None and (parameter.grad is not gradient or _version(gradient) != version):
                raise _changed(name)
        before, self._compared = self._compared, []
        if any(copy.tolist() for copy in before):
            raise _changed("a parameter, in the step before,")
        for names, kept in self._samples:
            now = self._elements(names)
            if now.is_cuda and now.shape == kept.shape:
                self._compared.append(HostCopy((now != kept).any()))
            elif not torch.equal(now, kept):
                raise _changed(self._first_change(names, kept))

    def _first_change(self, names: Sequence[str], kept: Tensor) -> str:
        start = 0
        for name in names:
            own = self._elements([name])
            if not torch.equal(own, kept[start : start + len(own)]):
                return name
            start += len(own)
        return names[0]


def accumulation(parameter: Tensor) -> Any:
    """Return the node of autograd that accumulates the gradient of a parameter."""
    with torch.enable_grad():
        return parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def uncompiled(function: Function) -> Function:
    """Return a function that Dynamo leaves out if a compiled function calls it, or calls backward with it as a hook."""
    return torch.compiler.disable(function)  # type: ignore[no-any-return, no-untyped-call]


def second_gradient(name: str) -> CallOrderError:
    """Return the error of a parameter that gets another gradient in a step, after its last one."""
    return CallOrderError(
        f"{name} got a second gradient in the last backward pass of a step, or after it",
        expected="no more than backward_passes_per_step backward passes before optimizer.step()",
        next_step="increase backward_passes_per_step, or call step() earlier; checkpoint activations with"
        " use_reentrant=False",
    )


def _changed(name: str) -> CallOrderError:
    return CallOrderError(
        f"the gradient of {name} was changed after backward, during its exchange",
        next_step="call optimizer.synchronize() before you clip, scale or clear gradients, then"
        " optimizer.step() within optimizer.skip_synchronize()",
    )


def _some_elements(gradient: Tensor) -> Tensor:
    """Return elements of a gradient that are evenly spaced in its memory."""
    count = gradient.numel()
    kept = min(count, _SAMPLED)
    flat = gradient.detach()
    if flat.untyped_storage().nbytes() < (flat.storage_offset() + count) * flat.element_size():  # elements share memory
        flat = flat.flatten()
    return flat.as_strided((kept,), (count // kept,))


def _version(gradient: Tensor) -> int:
    """Return a number that grows with each write; 0 for a part of a buffer, because parts share one number."""
    alone = not gradient.is_sparse and gradient.untyped_storage().nbytes() == gradient.nbytes
    return gradient._version if alone else 0
