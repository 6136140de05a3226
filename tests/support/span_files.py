"""The spans of a run as its report has them."""

from __future__ import annotations

from pathlib import Path

from hvdtrain.timeline.columns import RankSpans
from hvdtrain.timeline.span_files import on_one_clock, read_span_files
from hvdtrain.timeline.steps import read_starts


def read_spans(folder: Path) -> list[RankSpans]:
    """Those of the last start (``RUN/timeline``, or the run), a rank each, on rank 0's clock."""
    return on_one_clock(read_span_files(folder), read_starts(folder))
