"""Converts messages of all ranks to lines and events, in a thread of its own on rank 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from hvdtrain.observe.clock_fit import Offset
from hvdtrain.observe.clocks import Clocks
from hvdtrain.observe.stamp_message import unpack
from hvdtrain.observe.stamps import MOMENTS
from hvdtrain.observe.step_file import StepFile, block_line, ranks_event
from hvdtrain.observe.step_format import ClockLine, StartLine


class StepSink:
    """A sink of messages of all ranks.

    Args:
        file: receives a line per block.
        clocks: of all ranks; refined by the bounds of each block.
        origin_us: zero of the written times, by rank 0's clock.
        show: receives an event ``ranks`` per block if there are several ranks.
    """

    def __init__(
        self, file: StepFile, clocks: Clocks, origin_us: float, show: Callable[[dict[str, Any]], None]
    ) -> None:
        self._file = file
        self._clocks = clocks
        self._origin_us = origin_us
        self._show = show

    def start(self, line: StartLine, now_us: Sequence[float]) -> None:
        """Write the first line of a start. `now_us`: the current time by each rank's clock."""
        self._file.write(msgspec.structs.replace(line, clock=ClockLine.from_offsets(self._offsets(now_us))))

    def write(self, record: Mapping[str, Any]) -> None:
        """Write the line of a block and show its event."""
        first, stamps, facts = unpack(record["message"])
        ranks, steps, _ = stamps.shape
        sent, received = (stamps[:, :, MOMENTS.index(name)] for name in ("sent", "received"))
        self._clocks.add_bounds(sent, received)
        offsets = self._offsets(stamps[:, -1, MOMENTS.index("end")].tolist())
        self._file.write(block_line(first, stamps, facts, offsets, self._origin_us))
        if ranks > 1:
            self._show(ranks_event(first + steps - 1, stamps, offsets))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _offsets(self, times_us: Sequence[float]) -> list[Offset]:
        return [self._clocks.offset(rank, us) for rank, us in enumerate(times_us)]
