"""Detect parameters and buffers that differ between ranks, without an extra collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hvdtrain.comm.base import Comm
from hvdtrain.state.train_state import TrainState
from hvdtrain.training.diagnostics.health import check_equal, digests, replicated
from hvdtrain.training.loop.shared_buffers import SharedBuffers

_BITS = 16
"""Bits of a rank's hash: few enough that the sum of squares over a million ranks is exact in float64. Different tensors
have equal hashes once in 65,536 times; the next check finds them."""


@dataclass
class Drift:
    """A hash of this rank's parameters and persistent buffers, which some steps sum over ranks.

    The hashes are equal if ``size * sum(n^2) == sum(n)^2`` (Cauchy-Schwarz). All ranks have both sums, so they agree.

    Attributes:
        state: of the training.
        comm: the ranks.
        every: steps between two checks; 0 for none.
        buffers: makes buffers that differ equal.
        warn: shows a warning.
    """

    state: TrainState
    comm: Comm
    every: int
    buffers: SharedBuffers
    warn: Callable[[str], None]

    def values(self) -> list[int]:
        """Return this rank's hash and its square; zeros if no check is due."""
        if not self.every or self.state.progress.step % self.every:
            return [0, 0]
        mine = model_hash(self.state.model)
        return [mine, mine * mine]

    def on_sums(self, step: int, sums: Sequence[int]) -> None:
        """Check the state before step `step` by the sums. Collective: yes.

        Errors:
            DriftError: on every rank, with a parameter and the ranks, or with buffers that are only checked.
        """
        total, squares = sums
        if self.comm.size * squares != total * total:
            found = check_equal(self.state.model, self.comm, name="drift/found")
            self.buffers.share(found)
            if not found:
                self.warn(f"parameters differed between ranks before step {step}, and are equal again after it")


def model_hash(model: nn.Module) -> int:
    """Return a hash of `_BITS` bits of all replicated tensors. Waits for the device."""
    found = digests(replicated(model).values())
    places = torch.arange(1, len(found) + 1, dtype=torch.int64) * 2654435761 + 97
    # Multiply by an odd number, so that the highest bits depend on all others (Knuth's multiplicative hashing).
    mixed = int((found * places).sum()) * 0x9E3779B97F4A7C15
    return (mixed >> (64 - _BITS)) & ((1 << _BITS) - 1)
