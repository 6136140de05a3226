"""A rank's stamps of one block as the numbers that travel."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hvdtrain.observe.blocks import BLOCK
from hvdtrain.observe.host_load import CAUSES
from hvdtrain.observe.stamps import COLUMNS

FACTS = (*CAUSES, "expert_share")

_HEAD = 3
_LENGTH = _HEAD + len(FACTS) + BLOCK * len(COLUMNS)


class Block(NamedTuple):
    """What all ranks have told of some consecutive steps.

    Attributes:
        first: the first of them.
        stamps: microseconds of `COLUMNS`, by each rank's own clock [ranks, steps, columns].
        facts: those of `FACTS` that any rank knows, with a number a rank, NaN where unknown.
    """

    first: int
    stamps: NDArray[np.float64]
    facts: dict[str, list[float]]


def pack(first: int, count: int, wish: bool, facts: Sequence[float], rows: Sequence[Sequence[float]]) -> Tensor:
    """One rank's: (1, length) of float64, of the same length for each block.

    Args:
        first: the first step.
        count: of steps, `BLOCK` at most.
        wish: whether rank 0 wishes clocks to be compared anew.
        facts: `FACTS`.
        rows: `BLOCK` of nanoseconds, by `COLUMNS`.
    """
    values = [first, count, float(wish), *facts, *(value for row in rows for value in row)]
    assert len(values) == _LENGTH, len(values)
    return torch.frombuffer(array("d", values), dtype=torch.float64).unsqueeze(0)


def wishes(everyone: Tensor) -> bool:
    """What rank 0 wishes."""
    return bool(everyone[0, 2])


def unpack(everyone: NDArray[np.float64]) -> Block:
    """What all ranks told [ranks, length]."""
    ranks, first, count = len(everyone), round(everyone[0, 0]), round(everyone[0, 1])
    stamps = everyone[:, _HEAD + len(FACTS) :].reshape(ranks, BLOCK, len(COLUMNS))[:, :count] / 1e3
    values = everyone[:, _HEAD : _HEAD + len(FACTS)].T.round(3).tolist()
    known = {name: of for name, of in zip(FACTS, values, strict=True) if not all(map(math.isnan, of))}
    return Block(first, stamps, known)
