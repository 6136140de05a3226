"""Writer of ``RUN/timeline/steps.jsonl``: rank 0 writes the stamps of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from hvdtrain.errors import RunDirectoryError
from hvdtrain.observe.clock_fit import Offset
from hvdtrain.observe.clocks import Clocks
from hvdtrain.observe.host_load import throttle_text
from hvdtrain.observe.journal import LineFile
from hvdtrain.observe.past_journal import journal_lines
from hvdtrain.observe.stamps import COLUMNS, DURATIONS, MOMENTS, Block, unpack
from hvdtrain.observe.step_format import BlockLine, ClockLine, StartLine

_WRITTEN = MOMENTS[:4]


def starts_so_far(path: Path) -> int:
    """Count the starts in a file; 0 if it is missing or not readable."""
    try:
        return sum(line.get("event") == "start" for line in journal_lines(path))
    except OSError:
        return 0


@dataclass
class StepFile:
    """A sink that writes the messages of all ranks, in a thread of its own on rank 0.

    A write error ends the file with a warning; training continues.

    Attributes:
        path: the file; its folder is created.
        warn: called once on a write error.
        clocks: of all ranks; refined by the bounds of each block.
        origin_us: zero of the written times, by rank 0's clock.
        show: receives an event ``ranks`` per block if there are several ranks.
    """

    path: Path
    warn: Callable[[str], None]
    clocks: Clocks
    origin_us: float
    show: Callable[[dict[str, Any]], None]
    _file: LineFile | None = None
    _failed: bool = False

    def start(self, line: StartLine, now_us: Sequence[float]) -> None:
        """Write the first line of a start. `now_us`: the current time by each rank's clock."""
        self.append(msgspec.structs.replace(line, clock=ClockLine.from_offsets(self._offsets(now_us))))

    def write(self, record: Mapping[str, Any]) -> None:
        """Write the line of a block and show its event."""
        block = unpack(record["message"])
        sent, received = (block.stamps[:, :, MOMENTS.index(name)] for name in ("sent", "received"))
        self.clocks.add_bounds(sent, received)
        offsets = self._offsets(block.stamps[:, -1, MOMENTS.index("end")].tolist())
        self.append(block_line(block, offsets, self.origin_us))
        if len(offsets) > 1:
            self.show(ranks_event(block, offsets))

    def append(self, line: StartLine | BlockLine) -> None:
        """Append a line, unless an earlier one failed."""
        if self._failed:
            return
        try:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = LineFile(self.path)
            self._file.write(msgspec.to_builtins(line))
        except (OSError, RunDirectoryError) as error:
            self._failed = True
            self.warn(f"{self.path} ends here: {getattr(error, 'strerror', None) or error}; training continues")

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _offsets(self, times_us: Sequence[float]) -> list[Offset]:
        return [self.clocks.offset(rank, us) for rank, us in enumerate(times_us)]


def block_line(block: Block, offsets: Sequence[Offset], origin_us: float) -> BlockLine:
    """Return the line of a block. `offsets` are of the ranks' clocks; `origin_us` as in `StepFile`."""
    values = block.stamps.transpose(2, 0, 1).copy()  # [columns, ranks, steps]
    values[: len(_WRITTEN)] += np.array([[offset.us - origin_us] for offset in offsets])
    present = values.any(axis=(1, 2)).tolist()
    tables = dict(zip(COLUMNS, np.round(values, 1).tolist(), strict=True))
    start, ready, released, end = (tables[name] for name in _WRITTEN)
    parts = {name: tables[name] for name, some in zip(COLUMNS, present, strict=True) if name in DURATIONS and some}
    texts = {
        name: list(values) if name != "gpu_throttle" else [throttle_text(v) for v in values]
        for name, values in block.facts.items()
    }
    clock = ClockLine.from_offsets(offsets)
    elements = block.elements.astype(int).tolist() if block.elements.any() else []
    return BlockLine(block.first, start, ready, released, end, parts, texts, clock, elements)


def ranks_event(block: Block, offsets: Sequence[Offset]) -> dict[str, Any]:
    """Return the event of a block for metric sinks: milliseconds per step of each rank, means over the block."""
    shift = np.array([offset.us for offset in offsets])[:, None]
    start, ready, released, end = (block.stamps[:, :, number] for number in range(4))
    aligned = ready + shift

    def mean_ms(us: NDArray[np.float64]) -> list[float]:
        known = us[:, np.isfinite(us).all(axis=0)]
        return [round(float(value), 6) for value in known.mean(axis=1) / 1e3] if known.size else []

    return {
        "event": "ranks",
        "at_step": block.first + block.stamps.shape[1] - 1,
        "late_ms": mean_ms(aligned - aligned.min(axis=0)),
        "exposed_ms": mean_ms(released - ready),
        "step_ms": mean_ms(end - start),
    }
