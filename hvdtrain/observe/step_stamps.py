"""Gathers the step stamps of all ranks to rank 0, in blocks, during training."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hvdtrain.comm.base import Comm, Handle
from hvdtrain.observe.clocks import LATER, Clocks
from hvdtrain.observe.host_load import HostLoad
from hvdtrain.observe.sinks import Background
from hvdtrain.observe.stamps import BLOCK, is_gathered, pack, step_rows
from hvdtrain.spans import Spans

NAME = "timeline/stamps"
"""Name of the collective."""

_PATIENCE_S = 10.0
_PATIENCE_WHEN_FAILED_S = 1.0


@dataclass
class StepStamps:
    """Gathers each block of steps to rank 0 by one asynchronous allgather, started one step after the block.

    The result is received when it is ready, at the latest when the next gather starts. A step without work costs a
    microsecond. Rank 0 processes blocks in another thread.
    """

    comm: Comm
    spans: Spans
    clocks: Clocks
    causes: HostLoad
    started_at: int  # the step before the first one
    stop: int  # the last step
    writer: Background | None  # puts messages of all ranks into a `stamps.StepFile`; None on ranks other than 0
    expert_share: Callable[[], float] = lambda: math.nan
    """Returns the largest share that an expert got in the step after its last call; NaN if unknown."""
    _facts: list[float] = field(default_factory=list)
    _handle: Handle | None = None
    _probing: bool = False

    def __post_init__(self) -> None:
        self._gathered = self._last = self.started_at
        self._next = self.started_at + 1

    def begin_step(self, step: int) -> None:
        """Gather and observe as due before step `step`. Collective: yes."""
        self._last = step
        if self._handle is not None and self._handle.done():
            self._receive()
        if step < self._next:
            return
        block, number = divmod(step - 1 - self.started_at, BLOCK)
        self._next = step + (1 if number == 0 else BLOCK - number)
        if number == 0:
            self._read_facts()
        # One step late, because device spans of the block's last step may not be known earlier.
        elif number == 1 and block and is_gathered(block - 1, self.comm.size, self.stop - self.started_at):
            self._gather(step - 1 - BLOCK, BLOCK, self._facts)

    def finish(self) -> None:
        """Gather the remaining steps, after all ranks did the same steps. Collective: yes."""
        if self._last == self.started_at:
            return
        self.spans.pop_seconds()  # a device's last durations
        before, of_last = self._facts, self._read_facts()
        whole = self.started_at + (self._last - self.started_at) // BLOCK * BLOCK
        # The block to gather in the next step, and the last one, which is incomplete.
        for first, last, facts in ((whole - BLOCK + 1, whole, before), (whole + 1, self._last, of_last)):
            if first > self._gathered and first <= last:
                self._gather(first, last - first + 1, facts if last != self._last else of_last)
        self._receive()
        if self.writer is not None:
            self.writer.close(_PATIENCE_S)

    def close(self) -> None:
        """Stop gathering; write the received blocks."""
        self.causes.close()
        if self.writer is not None:
            self.writer.close(_PATIENCE_WHEN_FAILED_S)

    def _read_facts(self) -> list[float]:
        self._facts = [*self.causes.read(), self.expert_share()]
        return self._facts

    def _gather(self, first: int, count: int, facts: Sequence[float]) -> None:
        self._receive()
        if self._probing:
            self._probing = False
            self.clocks.probe(LATER)
        rows = step_rows(self.spans.raw_events(first - 1), first, BLOCK)
        message = pack(first, count, self.clocks.due, facts, rows, self.spans.sizes)
        self._handle = self.comm.allgather(message, name=NAME)
        # Nothing waits for it, so it must not appear as the collective that a rank waits for.
        self.comm.in_flight.pop(NAME, None)
        self._gathered = first + count - 1

    def _receive(self) -> None:
        handle, self._handle = self._handle, None
        if handle is None:
            return
        messages = handle.wait()
        self._probing = bool(messages[0, 2])  # whether rank 0 asks for it, see `pack`
        if self.writer is not None:
            self.writer.put({"message": messages.numpy()})
