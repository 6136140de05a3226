"""Flat buffers that hold many gradients: which parameter lies where. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

_ALIGNMENT = 64
"""Bytes: a view starts where vector instructions and cache lines do."""


@dataclass(frozen=True)
class Slot:
    """The place of one gradient.

    Attributes:
        name: of the parameter.
        parameter: whose gradient it is.
        start: first element in the bucket.
    """

    name: str
    parameter: nn.Parameter
    start: int

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """The gradient's place in `flat`, in the parameter's shape."""
        return flat[self.start : self.start + self.parameter.numel()].view(self.parameter.shape)


@dataclass(frozen=True)
class Layout:
    """One bucket: gradients of one dtype and device.

    Attributes:
        slots: in the order in which backward is expected to finish them.
        length: elements, gaps between slots included.
        dtype: of the gradients.
        device: of the gradients.
    """

    slots: tuple[Slot, ...]
    length: int
    dtype: torch.dtype
    device: torch.device


def lay_out(named_parameters: Sequence[tuple[str, nn.Parameter]], limit_bytes: int) -> list[Layout]:
    """Divide parameters into buckets of at most `limit_bytes`, a larger one alone.

    Backward finishes about in the reverse of the order in which a model was put together, so that order it is: a
    function of the model, equal on all ranks and in every run, and so is which sums are grouped together.
    """
    layouts: list[Layout] = []
    kinds = dict.fromkeys((p.dtype, p.device) for _, p in named_parameters)
    for dtype, device in kinds:
        slots: list[Slot] = []
        length = 0
        step = max(1, _ALIGNMENT // dtype.itemsize)
        for name, parameter in reversed(named_parameters):
            if (parameter.dtype, parameter.device) != (dtype, device):
                continue
            if slots and (length + parameter.numel()) * dtype.itemsize > limit_bytes:
                layouts.append(Layout(tuple(slots), length, dtype, device))
                slots, length = [], 0
            slots.append(Slot(name, parameter, length))
            length += -(-parameter.numel() // step) * step
        layouts.append(Layout(tuple(slots), length, dtype, device))
    return layouts
