"""Which JSON objects are events of Horovod, whoever wrote them down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hvdtrain.timeline.reading.tensor_names import MOST
from hvdtrain.timeline.reading.tensor_sizes import nbytes
from hvdtrain.timeline.reading.written import Names

_LATEST_US = 1e16
_BEYOND_US = 1e18


@dataclass(frozen=True)
class Found:
    """An event, as the columns of `hvdtrain.timeline.reading.written.Events` have it."""

    offset: int
    end: int
    kind: int
    ts: float
    pid: int
    name: int = 0
    nbytes: int = -1


@dataclass(frozen=True)
class Metadata:
    """What an event of metadata says.

    Attributes:
        pid: the tensor; 0 is the file itself.
        name: of the tensor, if it is said.
        epoch_us: the wall clock at time 0, if it is said.
    """

    pid: int
    name: str | None
    epoch_us: float | None


def as_found(
    event: Mapping[str, Any], offset: int, end: int, names: Names
) -> Found | Metadata | Literal["foreign"] | None:
    """An object as an event of Horovod.

    Args:
        event: with ``ph``.
        offset: where it stands.
        end: and ends.
        names: takes in the operation's name.

    Returns:
        "foreign": it is another program's; None: it is none.
    """
    kind, pid, name = event["ph"], event.get("pid"), event.get("name")
    if "tid" in event or "cat" in event:
        return "foreign"
    if kind == "M":
        return _as_metadata(event, pid)
    ts = _number(event.get("ts"))
    if ts is None or not 0 <= ts < _LATEST_US:
        return None
    if kind == "i":
        return Found(offset, end, ord("i"), ts, -1)
    if type(pid) is not int or not 0 <= pid < MOST:
        return None
    if kind == "B" and isinstance(name, str) and name:
        return Found(offset, end, ord("B"), ts, pid, names.number(name))
    if kind == "X" and isinstance(name, str) and name.isascii() and name.isdigit() and len(name) < 8:
        return Found(offset, end, ord("X"), ts, pid, int(name))
    if kind == "E":
        arguments = event.get("args")
        return Found(offset, end, ord("E"), ts, pid, 0, nbytes(arguments) if isinstance(arguments, dict) else -1)
    return None


def _as_metadata(event: Mapping[str, Any], pid: object) -> Metadata | None:
    arguments = event.get("args")
    if type(pid) is not int or not 0 <= pid < MOST or not isinstance(arguments, dict):
        return None
    if event.get("name") != "process_name":
        return Metadata(pid, None, None)
    name, epoch_us = arguments.get("name"), _number(arguments.get("start_time_since_epoch_in_micros"))
    return Metadata(
        pid,
        name if isinstance(name, str) else None,
        epoch_us if pid == 0 else None,
    )


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < _BEYOND_US else None
