"""Makes lines and events of what the ranks have told, in a thread of its own on rank 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvdtrain.observe.clock_fit import Offset
from hvdtrain.observe.clocks import Clocks
from hvdtrain.observe.stamp_message import unpack
from hvdtrain.observe.stamps import MOMENTS
from hvdtrain.observe.step_file import StepFile, block_line, clock_fields, ranks_event


class StepSink:
    """A sink of messages of all ranks.

    Args:
        file: takes a line a block.
        clocks: of all ranks; bounds that a block gives are taken up here.
        origin_us: of the times that are written, by rank 0's clock.
        show: takes an event ``ranks`` a block, where there are several ranks.
    """

    def __init__(
        self, file: StepFile, clocks: Clocks, origin_us: float, show: Callable[[dict[str, Any]], None]
    ) -> None:
        self._file = file
        self._clocks = clocks
        self._origin_us = origin_us
        self._show = show

    def start(self, line: Mapping[str, Any], now_us: Sequence[float]) -> None:
        """Write what begins a start; `now_us` is about now, by each rank's clock."""
        self._file.write({**line, "clock": clock_fields(self._offsets(now_us))})

    def write(self, record: Mapping[str, Any]) -> None:
        """Take what the ranks have told of a block."""
        first, stamps, facts = unpack(record["told"])
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
