"""Long flat tensors worked through in pieces that stay in a core's cache from one operation to the next."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

_CPU = 32 << 10
"""Elements: 128 KiB of fp32, so that a few of them lie in an L2 cache of 1 MiB. Calls cost some 2 us each, a tenth of
an operation on so many."""


def pieces(length: int, like: Tensor) -> Iterator[slice]:
    """Slices that cover `length` elements.

    On a GPU one slice: there, launches cost more than what a cache saves.
    """
    step = _CPU if like.device.type == "cpu" else max(length, 1)
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))
