"""Restore buffers of a model that a forward pass has written, such as running statistics of batch norm."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hvdtrain.comm.base import Comm
from hvdtrain.errors import TaskError
from hvdtrain.training.loop.step_part import StepPart
from hvdtrain.training.loop.sync_batch_norm import Synchronized

Place = tuple[nn.Module, str]
"""A module, and a name in its `_buffers`."""


@dataclass(frozen=True)
class Copied:
    """A buffer and a copy of its values; both are None if the model has no tensor of that name."""

    place: Place
    buffer: Tensor | None
    values: Tensor | None

    def is_changed(self) -> bool:
        """Return whether the tensor was replaced, or one of its bits changed."""
        module, name = self.place
        now = module._buffers.get(name)
        if now is not self.buffer or now is None or self.values is None:
            return now is not self.buffer
        if now.shape != self.values.shape or now.layout != torch.strided:
            return True
        return not torch.equal(_bits(now), _bits(self.values))

    def restore(self) -> None:
        """Restore the tensor and its values."""
        module, name = self.place
        module._buffers[name] = self.buffer
        if self.buffer is not None and self.values is not None:
            with torch.no_grad():
                self.buffer.copy_(self.values)


def copy_to_host(places: Iterable[Place]) -> list[Copied]:
    """Copy buffers to the host, which has the memory for it."""
    buffers = ((place, place[0]._buffers[place[1]]) for place in places)
    return [Copied(place, b, None if b is None else b.detach().to("cpu", copy=True)) for place, b in buffers]


def all_buffers(model: nn.Module) -> Iterator[Place]:
    """Yield every buffer, also empty ones."""
    return ((module, name) for module in model.modules() for name in module._buffers)


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that checkpoints contain, by name."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and _is_saved((module, name))
    }


@contextmanager
def _restored(copies: list[Copied]) -> Iterator[None]:
    try:
        yield
    finally:
        for copy in copies:
            copy.restore()


def restored_on_device(block: nn.Module) -> AbstractContextManager[object]:
    """Undo what a forward pass writes to persistent buffers, without waiting for the device: copies are there."""
    return _restored(_copy_on_device([place for place in all_buffers(block) if _is_saved(place)]))


class Rollback(StepPart):
    """Undoes what the forward passes of a step wrote to buffers, if the step is not applied.

    Only persistent buffers count: others are caches. The first step copies all of them to the host and finds the ones
    that it writes. Later steps copy only these; most models have none.

    Args:
        model: with the buffers.
        together: whether also the passes of other ranks write buffers of this one.
        refuses: whether a pass may write none: their values depend on which passes a rank has.
    """

    def __init__(self, model: nn.Module, *, together: bool = False, refuses: bool = False) -> None:
        self._model, self._together, self._refuses = model, together, refuses
        self._is_open = False
        self._written: list[Place] | None = None
        self._copies: list[Copied] = []

    def begin(self, count: int) -> None:  # noqa: D102
        self._is_open = count > 0 or self._together
        if not self._is_open:
            return
        if self._written is None:
            self._copies = copy_to_host(p for p in all_buffers(self._model) if _is_saved(p))
        elif self._written:
            self._copies = _copy_on_device(self._written)

    def around_repeated(self) -> AbstractContextManager[object]:
        """Undo what the passes within write to persistent buffers; not to those that all ranks write together."""
        own = (place for place in all_buffers(self._model) if not isinstance(place[0], Synchronized))
        return _restored(copy_to_host(place for place in own if _is_saved(place)))

    def abort(self) -> None:  # noqa: D102
        self.finish(0, applied=False)

    def among(self, comm: Comm) -> Rollback:  # noqa: D102
        return Rollback(self._model, together=self._together)

    def finish(self, step: int, *, applied: bool) -> None:
        """Restore the buffers, unless the step is applied.

        Errors: TaskError: a pass has written one, and may not.
        """
        if not self._is_open:
            return
        self._is_open = False
        if self._written is None and self._refuses and applied:
            self._refuse()
        if self._written is None:
            norm = nn.modules.batchnorm._NormBase  # it may be frozen now and write its statistics later
            written = (copy for copy in self._copies if copy.is_changed() or isinstance(copy.place[0], norm))
            self._written = [copy.place for copy in written]
        if not applied:
            for copy in self._copies:
                copy.restore()
        self._copies = []

    def _refuse(self) -> None:
        for copy in self._copies:
            if copy.is_changed():
                kind, name = type(copy.place[0]).__name__, copy.place[1]
                raise TaskError(
                    f"--train.reproducible bits, but a forward pass of the model writes the buffer {name} of {kind}",
                    expected="persistent buffers that passes do not write: each rank has other passes",
                    next_step="register_buffer(persistent=False) for a cache, or leave out --train.reproducible",
                )


def _copy_on_device(places: list[Place]) -> list[Copied]:
    """Copy buffers on the device, all in one call."""
    buffers = [module._buffers[name] for module, name in places]
    there = [buffer.detach() for buffer in buffers if buffer is not None]
    values = [torch.empty_like(buffer) for buffer in there]
    if there:
        torch._foreach_copy_(values, there)
    left = iter(values)
    return [Copied(p, b, None if b is None else next(left)) for p, b in zip(places, buffers, strict=True)]


def _is_saved(place: Place) -> bool:
    module, name = place
    return name not in module._non_persistent_buffers_set and module._buffers[name] is not None


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
