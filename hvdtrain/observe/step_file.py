"""``RUN/timeline/steps.jsonl``: the stamps of all ranks, written by rank 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.errors import RunDirectoryError
from hvdtrain.observe.clock_fit import Offset
from hvdtrain.observe.host_load import throttle_text
from hvdtrain.observe.line_file import LineFile
from hvdtrain.observe.past_journal import journal_lines
from hvdtrain.observe.stamps import COLUMNS, DURATIONS, MOMENTS

VERSION = 1
_WRITTEN = MOMENTS[:4]


def starts_so_far(path: Path) -> int:
    """How many starts of the run a file tells of; 0 where there is none or it cannot be read."""
    try:
        return sum(line.get("event") == "start" for line in journal_lines(path))
    except OSError:
        return 0


class StepFile:
    """Appends lines; what cannot be written costs the trace, not the training.

    Args:
        path: of the file; its folder is made.
        warn: told once when it cannot be written.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self._path = path
        self._warn = warn
        self._file: LineFile | None = None
        self._failed = False

    def write(self, line: Mapping[str, Any]) -> None:
        """Append a line."""
        if self._failed:
            return
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = LineFile(self._path)
            self._file.write(line)
        except (OSError, RunDirectoryError) as error:
            self._failed = True
            self._warn(f"{self._path} ends here: {getattr(error, 'strerror', None) or error}; training goes on")

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def start_line(
    start: int, at_step: int, hosts: Sequence[str], clock_ids: Sequence[str], origin_us: float
) -> dict[str, Any]:
    """What begins a start's lines; the link and the clocks come on top.

    Args:
        start: its number, from 0.
        at_step: the step it goes on from.
        hosts: of the ranks.
        clock_ids: of the ranks.
        origin_us: of all times, by rank 0's clock.
    """
    return {
        "version": VERSION,
        "event": "start",
        "start": start,
        "size": len(hosts),
        "at_step": at_step,
        "hosts": list(hosts),
        "clock_ids": list(clock_ids),
        "origin_us": origin_us,
    }


def clock_fields(offsets: Sequence[Offset]) -> dict[str, Any]:
    """What lines say of the ranks' clocks; null where nothing is known."""
    return {
        "offset_us": [round(offset.us, 3) for offset in offsets],
        "error_us": [round(offset.error_us, 3) for offset in offsets],
    }


def block_line(
    first: int,
    stamps: NDArray[np.float64],
    facts: Mapping[str, Sequence[float]],
    offsets: Sequence[Offset],
    origin_us: float,
) -> dict[str, Any]:
    """What is written of a block.

    Args:
        first: its first step.
        stamps: microseconds of `COLUMNS`, by each rank's own clock [ranks, steps, columns].
        facts: by name, a number a rank, NaN where unknown.
        offsets: of the ranks' clocks.
        origin_us: of the times that are written.
    """
    values = stamps.transpose(2, 0, 1).copy()  # [columns, ranks, steps]
    values[: len(_WRITTEN)] += np.array([[offset.us - origin_us] for offset in offsets])
    present = values.any(axis=(1, 2)).tolist()
    tables = dict(zip(COLUMNS, np.round(values, 1).tolist(), strict=True))
    words = {
        name: values if name != "gpu_throttle" else [throttle_text(v) for v in values] for name, values in facts.items()
    }
    return {
        "event": "block",
        "first_step": first,
        **{f"{name}_us": tables[name] for name in _WRITTEN},
        "parts_us": {
            name: tables[name] for name, some in zip(COLUMNS, present, strict=True) if name in DURATIONS and some
        },
        "facts": words,
        "clock": clock_fields(offsets),
    }


def ranks_event(at_step: int, stamps: NDArray[np.float64], offsets: Sequence[Offset]) -> dict[str, Any]:
    """A block as metric sinks get it: milliseconds a step of each rank, means over the block."""
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
