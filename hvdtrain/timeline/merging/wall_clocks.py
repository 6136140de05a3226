"""Conversion of the hosts' wall clocks to the clock of a merged trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hvdtrain.timeline.columns import RankSpans
from hvdtrain.timeline.span_files import newest_files, on_one_clock, read_span_files
from hvdtrain.timeline.steps import read_starts


@dataclass(frozen=True)
class Clocks:
    """Clocks of the last start of a run. The common clock is rank 0's, in microseconds.

    Attributes:
        spans: of the ranks, by the common clock.
        epoch_us: by rank, wall clock minus common clock.
        error_us: by rank, bound of the error; infinite if the clocks were never compared.
    """

    spans: Sequence[RankSpans] = ()
    epoch_us: Mapping[int, float] = field(default_factory=dict)
    error_us: Mapping[int, float] = field(default_factory=dict)

    def epoch_of(self, rank: int) -> float:
        """Return a rank's wall clock minus the common clock; rank 0's or 0 if unknown."""
        return self.epoch_us.get(rank, self.epoch_us.get(0, 0.0))


def read_clocks(folder: Path) -> Clocks:
    """Read the clocks from the span files in ``RUN/timeline``."""
    files = read_span_files(folder)
    moved, own = on_one_clock(files, read_starts(folder)), newest_files(files)
    epoch_us = {}
    for spans in moved:
        file = own[spans.rank]
        shift_us = spans.start_us[0] - file.spans.start_us[0] if len(spans.start_us) else 0.0
        epoch_us[spans.rank] = file.epoch_us - float(shift_us)
    return Clocks(moved, epoch_us, {spans.rank: spans.clock_error_us for spans in moved})
