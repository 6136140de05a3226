"""Selection of the steps to gather: blocks of consecutive steps, increasingly sparse. Pure."""

from __future__ import annotations

BLOCK = 16
"""Steps per block."""

_DENSE = 256
_DENSE_AT_LEAST = 4


def is_gathered(block: int, size: int) -> bool:
    """Return whether the stamps of a block are gathered; equal on all ranks. Blocks count from a start's first step.

    All of the first ``d = max(4, 256 // size)`` blocks are, every second up to ``2 d``, every fourth up to ``4 d``, and
    so on: ``d + d/2 log2(n/d)`` of n blocks. At about 2 KB per rank and block, a million steps take 5 MB for 1 rank, 6
    for 8, 8 for 64.
    """
    dense = max(_DENSE_AT_LEAST, _DENSE // size)
    return block % (1 << (block // dense).bit_length()) == 0
