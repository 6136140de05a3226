"""Every rank's stamps of its steps, brought to rank 0 in blocks while training goes on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from hvdtrain.comm.base import Comm, Handle
from hvdtrain.observe.blocks import BLOCK, is_told
from hvdtrain.observe.causes import CAUSES
from hvdtrain.observe.clocks import LATER, Clocks
from hvdtrain.observe.stamps import COLUMNS, MOMENTS, step_rows
from hvdtrain.spans import Spans

FACTS = (*CAUSES, "expert_share")

NAME = "timeline/stamps"
"""Of the collective."""

_HEAD = 3  # first step, number of steps, whether rank 0 wishes more probes
_LENGTH = _HEAD + len(FACTS) + BLOCK * len(COLUMNS)

Tell = Callable[[int, NDArray[np.float64], dict[str, list[float]]], None]


class Laps(Protocol):
    """Gives figures since it was last asked (`causes.Causes`)."""

    def lap(self) -> list[float]:
        """`CAUSES`, NaN where unknown."""
        ...

    def close(self) -> None:
        """Nobody asks any more."""
        ...


class Experts(Protocol):
    """Looks at the routers of a mixture of experts, where there is one."""

    def begin(self) -> None:
        """Look at the step that comes."""
        ...

    def end(self) -> None:
        """Look no more."""
        ...

    def take(self) -> float:
        """The share of tokens that went to one expert at most, of what was last looked at; NaN where unknown."""
        ...


class StepStamps:
    """Gathers blocks of steps to rank 0 by one asynchronous allgather each, begun one step after the block.

    It is waited for when it is over, at the latest when the next one begins. A step for which nothing is due costs a
    microsecond.

    Args:
        comm: the ranks.
        spans: of this rank.
        clocks: of all ranks.
        causes: of this rank's lateness.
        experts: None for a model without.
        started_at: the step before the first one.
        tell: rank 0's: takes the first step of a block, stamps in microseconds of `COLUMNS` by each rank's own clock
            [ranks, steps, columns], and `FACTS` by name with one number a rank.
    """

    def __init__(
        self,
        comm: Comm,
        spans: Spans,
        clocks: Clocks,
        causes: Laps,
        experts: Experts | None,
        started_at: int,
        tell: Tell | None,
    ) -> None:
        self._comm = comm
        self._spans = spans
        self._clocks = clocks
        self._causes = causes
        self._experts = experts
        self._started_at = started_at
        self._tell = tell
        self._facts: list[float] = []
        self._handle: Handle | None = None
        self._told = self._last = started_at
        self._probing = False

    def begin_step(self, step: int) -> None:
        """Step `step` is about to be done; begin or end what is due. Collective: yes."""
        self._last = step
        if self._handle is not None and self._handle.done():
            self._take()
        block, number = divmod(step - 1 - self._started_at, BLOCK)
        if number == 0:
            self._lap()
            if self._experts is not None and is_told(block, self._comm.size):
                self._experts.begin()
        elif number == 1:
            if self._experts is not None:
                self._experts.end()
            # A step late: what a device did in the last one of the block may not be known before.
            if block and is_told(block - 1, self._comm.size):
                self._gather(step - 1 - BLOCK, BLOCK, self._facts)

    def finish(self) -> None:
        """Gather what is left of the last steps, when every rank has done the same ones. Collective: yes."""
        if self._last == self._started_at:
            return
        self._spans.take()  # a device's last durations
        before, of_last = self._facts, self._lap()
        whole = self._started_at + (self._last - self._started_at) // BLOCK * BLOCK
        # The block that was to be told in the next step, and the one that was not to be whole any more.
        for first, last, facts in ((whole - BLOCK + 1, whole, before), (whole + 1, self._last, of_last)):
            if first > self._told and first <= last:
                self._gather(first, last - first + 1, facts if last != self._last else of_last)
        self._take()

    def close(self) -> None:
        """Gather no more."""
        self._causes.close()

    def _lap(self) -> list[float]:
        share = math.nan if self._experts is None else self._experts.take()
        self._facts = [*self._causes.lap(), share]
        return self._facts

    def _gather(self, first: int, count: int, facts: Sequence[float]) -> None:
        self._take()
        if self._probing:
            self._probing = False
            self._clocks.probe(LATER)
        rows = step_rows(self._spans.raw_events(first - 1), first, BLOCK)
        values = [first, count, float(self._clocks.due), *facts, *(value for row in rows for value in row)]
        self._handle = self._comm.allgather(torch.tensor([values], dtype=torch.float64), name=NAME)
        # No one waits for it: whoever asks what a rank is waiting for is to find what matters.
        self._comm.in_flight.pop(NAME, None)
        self._told = first + count - 1

    def _take(self) -> None:
        handle, self._handle = self._handle, None
        if handle is None:
            return
        everyone = handle.wait().numpy()
        self._probing = bool(everyone[0, 2])
        if self._tell is None:
            return
        assert everyone.shape == (self._comm.size, _LENGTH), everyone.shape
        first, count = round(everyone[0, 0]), round(everyone[0, 1])
        stamps = everyone[:, _HEAD + len(FACTS) :].reshape(self._comm.size, BLOCK, len(COLUMNS))[:, :count]
        sent, received = (stamps[:, :, MOMENTS.index(name)] for name in ("sent", "received"))
        self._clocks.saw(sent, received)
        facts = {name: everyone[:, _HEAD + number].round(3).tolist() for number, name in enumerate(FACTS)}
        self._tell(first, stamps, {n: values for n, values in facts.items() if not all(map(math.isnan, values))})
