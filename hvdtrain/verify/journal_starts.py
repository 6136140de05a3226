"""What a journal says of a run's starts and ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

_ENDINGS = ("finished", "stopped", "failed")


@dataclass
class Past:
    """What a journal says.

    Attributes:
        is_there: whether there is a journal.
        starts: of the run, by a command.
        ended: of them, by an ending of their own.
        is_open: the last start has no ending.
        changes: of the config, a line each.
        gone: ranges [begin, end) of positions that roll backs went past.
    """

    is_there: bool = False
    starts: int = 0
    ended: int = 0
    is_open: bool = False
    changes: list[str] = field(default_factory=list)
    gone: list[list[int]] = field(default_factory=list)

    @property
    def interrupted(self) -> int:
        """Starts that had no ending of their own when the next one began: killed, or their ranks changed."""
        return self.starts - self.ended - self.is_open


def read_past(path: Path) -> Past:
    """Read a journal's events; a run of a million steps takes a second."""
    past = Past()
    if not path.is_file():
        return past
    past.is_there = True
    with path.open("rb") as lines:
        for line in lines:
            if line.startswith(b'{"step":'):
                continue
            try:
                _add(past, orjson.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError):  # cut off by a kill
                continue
    return past


def _add(past: Past, event: dict[str, Any]) -> None:
    name = event.get("event")
    if name == "started":
        past.starts += 1
        past.is_open = True
    elif name in _ENDINGS:
        past.ended += past.is_open
        past.is_open = False
    elif name == "config_changed":
        past.changes += event["changes"]
    elif name == "rolled_back":
        past.gone.append(event["positions"])
