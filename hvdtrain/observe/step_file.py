"""Writer of ``RUN/timeline/steps.jsonl``: rank 0 writes the stamps of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from hvdtrain.errors import RunDirectoryError
from hvdtrain.observe.clock_fit import Offset
from hvdtrain.observe.host_load import throttle_text
from hvdtrain.observe.line_file import LineFile
from hvdtrain.observe.past_journal import journal_lines
from hvdtrain.observe.stamps import COLUMNS, DURATIONS, MOMENTS
from hvdtrain.observe.step_format import BlockLine, ClockLine, StartLine

_WRITTEN = MOMENTS[:4]


def starts_so_far(path: Path) -> int:
    """Count the starts in a file; 0 if it is missing or not readable."""
    try:
        return sum(line.get("event") == "start" for line in journal_lines(path))
    except OSError:
        return 0


class StepFile:
    """Appends lines. A write error ends the trace with a warning; training continues.

    Args:
        path: the file; its folder is created.
        warn: called once on a write error.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self._path = path
        self._warn = warn
        self._file: LineFile | None = None
        self._failed = False

    def write(self, line: StartLine | BlockLine) -> None:
        """Append a line."""
        if self._failed:
            return
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = LineFile(self._path)
            self._file.write(msgspec.to_builtins(line))
        except (OSError, RunDirectoryError) as error:
            self._failed = True
            self._warn(f"{self._path} ends here: {getattr(error, 'strerror', None) or error}; training continues")

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def block_line(
    first: int,
    stamps: NDArray[np.float64],
    facts: Mapping[str, Sequence[float]],
    offsets: Sequence[Offset],
    origin_us: float,
) -> BlockLine:
    """Return the line of a block.

    Args:
        first: number of the first step.
        stamps: microseconds of `COLUMNS`, by each rank's own clock [ranks, steps, columns].
        facts: by name, a number per rank, NaN if unknown.
        offsets: of the ranks' clocks.
        origin_us: zero of the written times, by rank 0's clock.
    """
    values = stamps.transpose(2, 0, 1).copy()  # [columns, ranks, steps]
    values[: len(_WRITTEN)] += np.array([[offset.us - origin_us] for offset in offsets])
    present = values.any(axis=(1, 2)).tolist()
    tables = dict(zip(COLUMNS, np.round(values, 1).tolist(), strict=True))
    start, ready, released, end = (tables[name] for name in _WRITTEN)
    parts = {name: tables[name] for name, some in zip(COLUMNS, present, strict=True) if name in DURATIONS and some}
    texts = {
        name: list(values) if name != "gpu_throttle" else [throttle_text(v) for v in values]
        for name, values in facts.items()
    }
    return BlockLine(first, start, ready, released, end, parts, texts, ClockLine.from_offsets(offsets))


def ranks_event(at_step: int, stamps: NDArray[np.float64], offsets: Sequence[Offset]) -> dict[str, Any]:
    """Return the event of a block for metric sinks: milliseconds per step of each rank, means over the block."""
    shift = np.array([offset.us for offset in offsets])[:, None]
    start, ready, released, end = (stamps[:, :, number] for number in range(4))
    aligned = ready + shift

    def mean_ms(us: NDArray[np.float64]) -> list[float]:
        known = us[:, np.isfinite(us).all(axis=0)]
        return [round(float(value), 6) for value in known.mean(axis=1) / 1e3] if known.size else []

    return {
        "event": "ranks",
        "at_step": at_step,
        "late_ms": mean_ms(aligned - aligned.min(axis=0)),
        "exposed_ms": mean_ms(released - ready),
        "step_ms": mean_ms(end - start),
    }
