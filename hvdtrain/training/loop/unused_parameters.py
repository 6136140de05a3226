"""Parameters that no rank uses in a step: the counts of their users, in the numbers that a step sums anyway."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch.optim import Optimizer

_BITS = 52
"""Bits of a whole number that float64 holds exactly."""


@lru_cache(maxsize=8)
def count_users(unused: tuple[bool, ...], ranks: int) -> list[int]:
    """Return whole numbers. Their sums over `ranks` ranks count the users of each parameter, several in one.

    Args:
        unused: for each parameter, whether this rank has not used it.
        ranks: the world size.
    """
    count, base = _in_one(ranks), ranks + 1
    return [
        sum(base**digit for digit, each in enumerate(unused[begin : begin + count]) if not each)
        for begin in range(0, len(unused), count)
    ]


def used_by_nobody(sums: Sequence[int], unused: Sequence[bool], ranks: int) -> list[int]:
    """Return the positions of the parameters without a user, from the sums of `count_users`."""
    count, base = _in_one(ranks), ranks + 1
    return [n for n, each in enumerate(unused) if each and not sums[n // count] // base ** (n % count) % base]


def begin_momentum(optimizer: Optimizer) -> None:
    """Give parameters that torch's fused SGD updates for the first time a momentum of zero, if others have one.

    Its kernel takes the momentum of all or of none, and fails otherwise. With dampening zero is not right: it fails.
    """
    for group in optimizer.param_groups:
        if isinstance(optimizer, torch.optim.SGD) and group["fused"] and group["momentum"] and not group["dampening"]:
            states = [optimizer.state[parameter] for parameter in group["params"] if parameter.grad is not None]
            if any(state.get("momentum_buffer") is not None for state in states):
                for parameter in group["params"]:
                    if parameter.grad is not None and optimizer.state[parameter].get("momentum_buffer") is None:
                        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter.grad)


def _in_one(ranks: int) -> int:
    """Return how many counts of at most `ranks` one number holds."""
    return int(_BITS / math.log2(ranks + 1))
