"""Where a number that is not finite came from."""

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
"""Whose lines are passed over: torch's and the training loop's own."""


@dataclass(frozen=True)
class Origin:
    """Where a number that is not finite came from.

    Attributes:
        kind: forward or backward, which made it of finite ones; parameter or input, where it was one from the start;
            overflow, of a gradient that is too large for its format.
        module: name in the model, "" for the model itself, None outside of it: in the loss function.
        module_type: its class.
        function: what made it: a function of torch, or one of its gradients.
        place: file:line of the call, outside of torch.
        tensor: name of the parameter, where it is one.
    """

    kind: str
    module: str | None = None
    module_type: str | None = None
    function: str | None = None
    place: str | None = None
    tensor: str | None = None

    def __str__(self) -> str:
        """One sentence's worth."""
        where = f"{self.module or 'the model'} ({self.module_type})" if self.module is not None else "the loss function"
        if self.kind == "parameter":
            return f"{self.tensor} of {where} is not finite itself"
        by = f" by {self.function}" if self.function else ""
        at = f", {self.place}" if self.place else ""
        if self.kind == "input":
            return f"the batch itself is not finite; first used in {where}{by}{at}"
        made = {"forward": "made in the forward pass of", "backward": "made in the backward pass of"}
        return f"{made.get(self.kind, 'a gradient too large for its format, in')} {where}{by}{at}"


def not_finite(value: Tensor) -> bool:
    """Whether any element is inf or nan. Waits for the device."""
    if not (value.is_floating_point() or value.is_complex()):
        return False
    try:
        return not bool(value.detach().isfinite().all())  # detached: activation checkpointing counts what is saved
    except (
        RuntimeError,
        NotImplementedError,
    ):  # tensors without values (within vmap, meta) and dtypes without the test
        return False


def leaves(value: Any) -> Iterator[Any]:
    """What stands in nested tuples, lists, dicts and dataclasses."""
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
    """The tensors of a nested value."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]


def place(stack: Iterable[str]) -> str | None:
    """``file:line`` of the innermost call that is neither torch's nor the training loop's, of a formatted stack."""
    frames = _FRAME.findall("".join(stack))
    for file, line in reversed(frames):
        if not file.startswith((*_NOT_THE_CAUSE, "<")):
            return f"{file}:{line}"
    return None
