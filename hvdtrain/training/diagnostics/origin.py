"""The origin of a non-finite number."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_FRAME = re.compile(r'File "(.+?)", line (\d+)')
_NOT_THE_CAUSE = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
"""Folders of torch and of this package: their lines are not the cause."""


@dataclass(frozen=True)
class Origin:
    """The origin of a non-finite number.

    Attributes:
        kind: forward or backward, which made it from finite numbers; parameter or input, which was non-finite from the
            start; overflow, for a gradient that is too large for its format.
        module: name in the model; "" for the model itself; None for the loss function.
        module_type: its class.
        function: that made it: a torch function, or its gradient.
        place: file:line of the call, outside torch.
        tensor: name of the parameter, if it is one.
    """

    kind: str
    module: str | None = None
    module_type: str | None = None
    function: str | None = None
    place: str | None = None
    tensor: str | None = None

    def __str__(self) -> str:
        """Describe it in a phrase."""
        where = f"{self.module or 'the model'} ({self.module_type})" if self.module is not None else "the loss function"
        if self.kind == "parameter":
            return f"{self.tensor} of {where} is itself not finite"
        by = f" by {self.function}" if self.function else ""
        at = f", {self.place}" if self.place else ""
        if self.kind == "input":
            return f"the batch itself is not finite; first used in {where}{by}{at}"
        made = {"forward": "made in the forward pass of", "backward": "made in the backward pass of"}
        return f"{made.get(self.kind, 'a gradient too large for its format, in')} {where}{by}{at}"


def not_finite(value: Tensor) -> bool:
    """Return whether any element is inf or nan. Waits for the device."""
    if not (value.is_floating_point() or value.is_complex()):
        return False
    try:
        return not bool(value.detach().isfinite().all())  # detached: activation checkpointing counts saved tensors
    except (RuntimeError, NotImplementedError):  # no values (vmap, meta), or a dtype without the test
        return False


def leaves(value: Any) -> Iterator[Any]:
    """Yield the leaves of nested tuples, lists, dicts and dataclasses."""
    if isinstance(value, dict):
        value = value.values()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = vars(value).values()
    elif not isinstance(value, (tuple, list)):
        yield value
        return
    for part in value:
        yield from leaves(part)


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors in a nested value."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]


def source_line(stack: Iterable[str]) -> str | None:
    """Return ``file:line`` of the innermost call in a formatted stack that is outside torch and this package."""
    frames = _FRAME.findall("".join(stack))
    for file, line in reversed(frames):
        if not file.startswith((*_NOT_THE_CAUSE, "<")):
            return f"{file}:{line}"
    return None
