"""Parameters and buffers that are no longer equal on all ranks, found without a collective of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from hvdtrain.comm.base import Comm
from hvdtrain.state.train_state import TrainState
from hvdtrain.training.diagnostics.health import check_equal, digests, replicated
from hvdtrain.training.loop.shared_buffers import SharedBuffers

_BITS = 16
"""Of a rank's number: so few that sums of its square over a million ranks are exact in float64. Tensors that differ
have the same number once in 65,536 times, and are found the next time."""


class Drift:
    """A number of all parameters and persistent buffers of this rank, which travels with the sums of some steps.

    Ranks have equal numbers where ``size * sum(n^2) == sum(n)^2``: of two sums that all have, so that all agree on it
    (Cauchy and Schwarz).

    Args:
        state: whose model; how far it is, also after it was taken back.
        comm: the ranks.
        every: steps between two looks; 0 for none.
        buffers: makes those that differ equal.
        warn: takes a line for a person.
    """

    def __init__(
        self, state: TrainState, comm: Comm, every: int, buffers: SharedBuffers, warn: Callable[[str], None]
    ) -> None:
        self._state = state
        self._comm = comm
        self._every = every
        self._buffers = buffers
        self._warn = warn

    def notices(self) -> list[int]:
        """What the step that comes sums over ranks: this rank's number and its square, zeros where none is due."""
        if not self._every or self._state.progress.step % self._every:
            return [0, 0]
        mine = number(self._state.model)
        return [mine, mine * mine]

    def agreed(self, step: int, notices: Sequence[int]) -> None:
        """See what the sums say of the state before step `step`. Collective: yes.

        Errors:
            DriftError: on every rank, naming a parameter and ranks, or buffers that are only checked.
        """
        total, squares = notices
        if self._comm.size * squares != total * total:
            found = check_equal(self._state.model, self._comm, name="drift/found")
            self._buffers.share(found)
            if not found:
                self._warn(f"before step {step} parameters were not equal on all ranks; after it they are again")


def number(model: nn.Module) -> int:
    """A number of `_BITS` bits, a function of all bits that ranks hold copies of. Waits for the device."""
    found = digests(replicated(model).values())
    places = torch.arange(1, len(found) + 1, dtype=torch.int64) * 2654435761 + 97
    # Times an odd number, so that the uppermost bits depend on all others (Knuth's multiplicative hashing).
    mixed = int((found * places).sum()) * 0x9E3779B97F4A7C15
    return (mixed >> (64 - _BITS)) & ((1 << _BITS) - 1)
