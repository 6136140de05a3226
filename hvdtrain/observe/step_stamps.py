"""Every rank's stamps of its steps, brought to rank 0 in blocks while training goes on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from hvdtrain.comm.base import Comm, Handle
from hvdtrain.observe.blocks import BLOCK, is_told
from hvdtrain.observe.clocks import LATER, Clocks
from hvdtrain.observe.stamp_message import pack, wishes
from hvdtrain.observe.stamps import step_rows
from hvdtrain.spans import Spans

NAME = "timeline/stamps"
"""Of the collective."""

_PATIENCE_S = 10.0
_PATIENCE_WHEN_FAILED_S = 1.0


class Writer(Protocol):
    """Takes what the ranks have told, and does the work elsewhere (`sinks.Background`)."""

    def put(self, record: Mapping[str, Any]) -> None:
        """Take a message of all ranks, as ``told``."""
        ...

    def close(self, patience_s: float) -> None:
        """Finish what was taken, for at most so long."""
        ...


class Laps(Protocol):
    """Gives figures since it was last asked (`causes.Causes`)."""

    def read(self) -> list[float]:
        """`causes.CAUSES`, NaN where unknown."""
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

    def pop_share(self) -> float:
        """The share of tokens that went to one expert at most, of what was last looked at; NaN where unknown."""
        ...

    def close(self) -> None:
        """Leave the model as it was, also amid a step that is looked at."""
        ...


class StepStamps:
    """Gathers blocks of steps to rank 0 by one asynchronous allgather each, begun one step after the block.

    It is waited for when it is over, at the latest when the next one begins. A step for which nothing is due costs a
    microsecond; what rank 0 makes of a block is done in another thread.

    Args:
        comm: the ranks.
        spans: of this rank.
        clocks: of all ranks.
        causes: of this rank's lateness.
        experts: None for a model without.
        started_at: the step before the first one.
        writer: None on ranks other than 0.
    """

    def __init__(
        self,
        comm: Comm,
        spans: Spans,
        clocks: Clocks,
        causes: Laps,
        experts: Experts | None,
        started_at: int,
        writer: Writer | None,
    ) -> None:
        self._comm = comm
        self._spans = spans
        self._clocks = clocks
        self._causes = causes
        self._experts = experts
        self._started_at = started_at
        self._writer = writer
        self._facts: list[float] = []
        self._handle: Handle | None = None
        self._told = self._last = started_at
        self._next = started_at + 1
        self._probing = False

    def begin_step(self, step: int) -> None:
        """Step `step` is about to be done; begin or end what is due. Collective: yes."""
        self._last = step
        if self._handle is not None and self._handle.done():
            self._take()
        if step < self._next:
            return
        block, number = divmod(step - 1 - self._started_at, BLOCK)
        self._next = step + (1 if number == 0 else BLOCK - number)
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
        self._spans.pop_seconds()  # a device's last durations
        before, of_last = self._facts, self._lap()
        whole = self._started_at + (self._last - self._started_at) // BLOCK * BLOCK
        # The block that was to be told in the next step, and the one that was not to be whole any more.
        for first, last, facts in ((whole - BLOCK + 1, whole, before), (whole + 1, self._last, of_last)):
            if first > self._told and first <= last:
                self._gather(first, last - first + 1, facts if last != self._last else of_last)
        self._take()
        if self._writer is not None:
            self._writer.close(_PATIENCE_S)

    def close(self) -> None:
        """Gather no more; what has come is written."""
        if self._experts is not None:
            self._experts.close()
        self._causes.close()
        if self._writer is not None:
            self._writer.close(_PATIENCE_WHEN_FAILED_S)

    def _lap(self) -> list[float]:
        share = math.nan if self._experts is None else self._experts.pop_share()
        self._facts = [*self._causes.read(), share]
        return self._facts

    def _gather(self, first: int, count: int, facts: Sequence[float]) -> None:
        self._take()
        if self._probing:
            self._probing = False
            self._clocks.probe(LATER)
        rows = step_rows(self._spans.raw_events(first - 1), first, BLOCK)
        self._handle = self._comm.allgather(pack(first, count, self._clocks.due, facts, rows), name=NAME)
        # No one waits for it: whoever asks what a rank is waiting for is to find what matters.
        self._comm.in_flight.pop(NAME, None)
        self._told = first + count - 1

    def _take(self) -> None:
        handle, self._handle = self._handle, None
        if handle is None:
            return
        everyone = handle.wait()
        self._probing = wishes(everyone)
        if self._writer is not None:
            self._writer.put({"told": everyone.numpy()})
