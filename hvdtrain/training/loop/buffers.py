"""Buffers of a model that its forward pass writes, such as the running statistics of batch norm, put back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Place = tuple[nn.Module, str]
"""A module, and a name in its `_buffers`."""


@dataclass(frozen=True)
class Copied:
    """A buffer and its values at one time.

    Attributes:
        place: where it stood.
        buffer: the tensor itself; None where the name was taken, but empty.
        values: a copy.
    """

    place: Place
    buffer: Tensor | None
    values: Tensor | None

    def is_changed(self) -> bool:
        """Whether another tensor stands there now, or one bit of it is another."""
        module, name = self.place
        now = module._buffers.get(name)
        if now is not self.buffer or now is None or self.values is None:
            return now is not self.buffer
        if now.shape != self.values.shape or now.layout != torch.strided:
            return True
        return not torch.equal(_bits(now), _bits(self.values))

    def put_back(self) -> None:
        """Let the buffer be what it was."""
        module, name = self.place
        module._buffers[name] = self.buffer
        if self.buffer is not None and self.values is not None:
            with torch.no_grad():
                self.buffer.copy_(self.values)


def copied_to_host(places: Iterable[Place]) -> list[Copied]:
    """Copies on the host, where there is room."""
    found = ((place, place[0]._buffers[place[1]]) for place in places)
    return [Copied(place, b, None if b is None else b.detach().to("cpu", copy=True)) for place, b in found]


def all_buffers(model: nn.Module) -> Iterator[Place]:
    """Every buffer, empty ones as well."""
    return ((module, name) for module in model.modules() for name in module._buffers)


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a checkpoint holds, by name."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and _is_saved((module, name))
    }


class Rollback:
    """What a training step's forward passes write to buffers is undone where the step is not applied.

    Only what a checkpoint holds is looked at: other buffers are caches. The first step copies all of it to the host,
    and finds out what a step writes; each step after that copies this alone, which for most models is nothing.

    Args:
        model: on its device.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._written: list[Place] | None = None
        self._copies: list[Copied] = []

    def begin(self) -> None:
        """Keep what the step may write."""
        if self._written is None:
            self._copies = copied_to_host(p for p in all_buffers(self._model) if _is_saved(p))
        elif self._written:
            self._copies = _copied(self._written)

    def end(self, *, applied: bool) -> None:
        """Undo what was written since `begin`, unless the step is applied."""
        if self._written is None:
            self._written = [copy.place for copy in self._copies if copy.is_changed() or _is_statistic(copy.place)]
        if not applied:
            for copy in self._copies:
                copy.put_back()
        self._copies = []


def _copied(places: list[Place]) -> list[Copied]:
    """Copies on the device, made together."""
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


def _is_statistic(place: Place) -> bool:
    """Written by a batch norm that is frozen now, perhaps, and is not later."""
    return isinstance(place[0], nn.modules.batchnorm._NormBase)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
