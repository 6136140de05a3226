"""What a journal tells of a run so far, to those who go on showing it."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import orjson


class Past:
    """The steps of a journal; of one that was done again after a resume, the last counts.

    Args:
        path: the journal; one that is missing holds no steps.

    Attributes:
        seconds: by step, seconds of training up to and with it; 0.0 at step 0.
        positions: by step, samples consumed after it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.seconds = array("d", [0.0])
        self.positions = array("q", [0])
        self._offsets = array("q", [0])

    def read(self) -> Past:
        """Read the journal; itself."""
        offset = 0
        if self._path.exists():
            with self._path.open("rb") as lines:
                for line in lines:
                    if line.startswith(b'{"step":'):
                        self._add(line, offset)
                    offset += len(line)
        return self

    def _add(self, line: bytes, offset: int) -> None:
        try:
            record = orjson.loads(line)
        except ValueError:  # cut off by a kill
            return
        step = record["step"]
        columns: tuple[tuple[array[Any], Any], ...] = (
            (self.positions, record["position"]),
            (self._offsets, offset),
        )
        del self.seconds[step:]
        self.seconds.extend([self.seconds[-1]] * (step - len(self.seconds)))  # begun from another run's checkpoint
        self.seconds.append(self.seconds[-1] + record["step_s"])
        for column, value in columns:
            del column[step:]
            column.extend([column[-1]] * (step - len(column)))
            column.append(value)

    def __contains__(self, step: int) -> bool:
        return 0 <= step < len(self.seconds)

    def before(self, step: int, since_s: float) -> int:
        """The last step that ended more than `since_s` seconds of training before `step` did.

        Not by the times of the lines: a clock may have been set between two starts of the run.
        """
        earlier = step
        while earlier > 0 and self.seconds[earlier] >= self.seconds[step] - since_s:
            earlier -= 1
        return earlier

    def after(self, first: int, last: int) -> list[dict[str, Any]]:
        """Records of the steps after `first`, up to `last`, in order, and events of these steps; of 0 as well."""
        found: dict[tuple[int, str], dict[str, Any]] = {}
        with self._path.open("rb") as lines:
            lines.seek(self._offsets[first])
            for line in lines:
                try:
                    record = orjson.loads(line)
                except ValueError:
                    continue
                step = record.get("at_step") if "event" in record else record["step"]
                if step is not None and (first < step or first == 0) and step <= last:
                    # An event follows its step.
                    found[step, record.get("event", "")] = record
        return [found[key] for key in sorted(found)]
