"""The format of ``spans-rank-N.json``, for writer and reader: a Chrome trace with our metadata."""

from __future__ import annotations

import re

from msgspec import Struct

CLOCK, BUCKET = "clock", "bucket"
"""Names of our metadata events; their arguments are `SpanClock` and the fields of `BucketFacts`."""

_TITLE = re.compile(r"rank \d+ on (.*)", re.DOTALL)


class SpanClock(Struct):
    """The clock of a span file.

    Attributes:
        start_time_since_epoch_in_micros: the wall clock at the file's time 0.
        monotonic_us: the rank's clock (`time.perf_counter_ns`) at the file's time 0.
        clock_id: equal ones are the same clock.
        start: number of the start; -1 if unknown.
    """

    start_time_since_epoch_in_micros: float
    monotonic_us: float = 0.0
    clock_id: str = ""
    start: int = -1


def title(rank: int, host: str) -> str:
    """Return the name of a rank's process in the trace."""
    return f"rank {rank} on {host}"


def host_of(process_title: str) -> str:
    """Return the host in a `title`; empty if it has another form."""
    found = _TITLE.fullmatch(process_title)
    return found[1] if found else ""
