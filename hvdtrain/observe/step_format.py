"""The format of ``RUN/timeline/steps.jsonl``, for writer and reader: a line per start and per block of steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta, Struct

VERSION = 1

Numbers = list[float | None]
"""One number per rank, or one per step; None if unknown."""


class Offset(NamedTuple):
    """Microseconds to add to another clock's time, and their largest error."""

    us: float
    error_us: float


class ClockLine(Struct):
    """Clock offsets per rank: rank 0's clock minus the rank's clock, and the bound of its error."""

    offset_us: Numbers
    error_us: Numbers

    @classmethod
    def from_offsets(cls, offsets: Sequence[Offset]) -> ClockLine:
        """Round offsets to nanoseconds."""
        return cls([round(offset.us, 3) for offset in offsets], [round(offset.error_us, 3) for offset in offsets])

    def fits(self, size: int) -> bool:
        """Whether there is a number for each rank."""
        return len(self.offset_us) == len(self.error_us) == size


class StartLine(Struct, tag_field="event", tag="start"):
    """The first line of a start."""

    version: int
    start: int  # number of the start, from 0
    size: Annotated[int, Meta(gt=0)]
    at_step: int  # the step from which it resumes
    hosts: list[str]
    clock_ids: list[str]  # of the ranks; equal ones are the same clock
    origin_us: float  # zero of all times in this start, by rank 0's clock
    link: list[tuple[int, float]] = []  # allreduces measured at the start: pairs of bytes and seconds
    clock: ClockLine | None = msgspec.field(default=None)  # offsets at the start
    devices: list[str] = []  # of the ranks: UUID of the GPU, or PCI address; empty for CPUs
    consecutive_stages: Annotated[int, Meta(gt=0)] = 1  # stages of each pipeline, of equally many consecutive ranks

    def fits(self) -> bool:
        """Whether all lists have an entry for each rank."""
        lists = [self.hosts, self.clock_ids, *([self.devices] if self.devices else [])]
        return all(len(each) == self.size for each in lists) and (not self.clock or self.clock.fits(self.size))


class BlockLine(Struct, tag_field="event", tag="block"):
    """The stamps of consecutive steps."""

    first_step: int
    start_us: list[Numbers]  # this and the next three: since the origin, by rank 0's clock [ranks, steps]
    ready_us: list[Numbers]
    released_us: list[Numbers]
    end_us: list[Numbers]
    parts_us: dict[str, list[Numbers]]  # durations by name; absent ones are 0 [ranks, steps]
    facts: dict[str, list[Any]]  # figures by name, one per rank
    clock: ClockLine  # offsets at the end of the block
    elements: list[list[int]] = []  # of the rank's batches, in the largest tensor of each; [] if unknown [ranks, steps]

    @property
    def moments(self) -> tuple[list[Numbers], list[Numbers], list[Numbers], list[Numbers]]:
        """Start, ready, released and end."""
        return self.start_us, self.ready_us, self.released_us, self.end_us

    @property
    def steps(self) -> int:
        """The number of steps."""
        return len(self.start_us[0])

    def fits(self, size: int) -> bool:
        """Whether all tables have the same shape, of `size` ranks and at least one step."""
        tables: list[Any] = [*self.moments, *self.parts_us.values(), *([self.elements] if self.elements else [])]
        lengths = {len(row) for table in tables for row in table}
        if len(lengths) != 1 or 0 in lengths or not self.clock.fits(size):
            return False
        return all(len(table) == size for table in (*tables, *self.facts.values()))


def as_array(table: Sequence[Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return numbers as float64, None as NaN."""
    return np.array(table, dtype=np.float64)
