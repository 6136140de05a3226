"""Which steps all ranks tell rank 0 about: blocks of consecutive ones, ever sparser. Pure."""

from __future__ import annotations

BLOCK = 16
"""Steps."""

_DENSE = 256
_DENSE_AT_LEAST = 4


def is_told(block: int, size: int) -> bool:
    """Whether the block of this number, counted from 0 with the first step of a start, is told; equal on all ranks.

    All of the first ``d = max(4, 256 // size)`` blocks, every second up to ``2 d``, every fourth up to ``4 d``, and so
    on: after n blocks ``d + d/2 log2(n/d)`` of them. At some 2 KB a rank and block, a million steps leave 5 MB at 1
    rank, 6 at 8, 8 at 64.
    """
    dense = max(_DENSE_AT_LEAST, _DENSE // size)
    return block % (1 << (block // dense).bit_length()) == 0
