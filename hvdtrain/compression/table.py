"""The compressors by name, each with what it sends: needs no torch.

A compression is written ``name``, ``name:number`` or, with the number left to its default, ``name``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Shapes = Sequence[Sequence[int]]
"""Of the gradients in one bucket."""
Payload = dict[str, int]
"""Bytes that a rank hands to each kind of collective in one exchange of a bucket."""


@dataclass(frozen=True)
class Kind:
    """One line of the table.

    Attributes:
        name: how it is called in options.
        make: "module:name" of the `Compressor`, made with `number` as its keyword argument where that is not None.
        number: the keyword of its number, None where it takes none.
        default: of the number.
        feedback: whether what an exchange leaves behind is added to the next gradient.
        payload: by shapes, bytes an element, length of the bucket, ranks and number.
    """

    name: str
    make: str
    payload: Callable[[Shapes, int, int, int, float], Payload]
    number: str | None = None
    default: float = 0.0
    feedback: bool = False
