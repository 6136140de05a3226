"""A rank's stamps of one block as a tensor to gather."""

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
    """The stamps of consecutive steps of all ranks.

    Attributes:
        first: number of the first step.
        stamps: microseconds of `COLUMNS`, by each rank's own clock [ranks, steps, columns].
        facts: those of `FACTS` that any rank knows, a number per rank, NaN if unknown.
    """

    first: int
    stamps: NDArray[np.float64]
    facts: dict[str, list[float]]


def pack(first: int, count: int, probe_clocks: bool, facts: Sequence[float], rows: Sequence[Sequence[float]]) -> Tensor:
    """Return one rank's message: float64 [1, length], of the same length for each block.

    Args:
        first: number of the first step.
        count: number of steps, at most `BLOCK`.
        probe_clocks: rank 0 requests a comparison of clocks.
        facts: `FACTS`.
        rows: nanoseconds [BLOCK, columns], by `COLUMNS`.
    """
    values = [first, count, float(probe_clocks), *facts, *(value for row in rows for value in row)]
    assert len(values) == _LENGTH, len(values)
    return torch.frombuffer(array("d", values), dtype=torch.float64).unsqueeze(0)


def requests_clock_probe(messages: Tensor) -> bool:
    """Return whether rank 0 requests a comparison of clocks."""
    return bool(messages[0, 2])


def unpack(messages: NDArray[np.float64]) -> Block:
    """Convert the messages of all ranks [ranks, length]."""
    ranks, first, count = len(messages), round(messages[0, 0]), round(messages[0, 1])
    stamps = messages[:, _HEAD + len(FACTS) :].reshape(ranks, BLOCK, len(COLUMNS))[:, :count] / 1e3
    values = messages[:, _HEAD : _HEAD + len(FACTS)].T.round(3).tolist()
    facts = {name: row for name, row in zip(FACTS, values, strict=True) if not all(map(math.isnan, row))}
    return Block(first, stamps, facts)
