"""How a command asks a job that is running for a window of its traces, and what it answers: two small files.

In ``RUN/timeline/``: `.window-request.json` by the command, `.window-answer.json` by rank 0. Whoever may write into the
run's folder may ask; nothing listens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import orjson

from hvdtrain.durable import write_text
from hvdtrain.regular import read_regular
from hvdtrain.run_layout import TimelineLayout

_VERSION = 1


@dataclass(frozen=True)
class Request:
    """What is wanted.

    Attributes:
        id: unlike any before.
        action: begin a window, or end it.
        steps: after which it ends by itself; 0 for never.
        profile: record torch.profiler too.
    """

    id: str
    action: Literal["start", "stop"]
    steps: int = 0
    profile: bool = False


@dataclass(frozen=True)
class Answer:
    """What became of it.

    Attributes:
        id: of the request.
        state: seen by the job; open: steps are being recorded; over: the files are written; none: nothing to stop.
        first: step of the window.
        last: step of the window; None while it has no end.
        files: that hold it, once it is over; those of rank 0.
        lacks: what is not recorded, and why.
    """

    id: str
    state: Literal["seen", "open", "over", "none"]
    first: int = 0
    last: int | None = None
    files: Sequence[str] = ()
    lacks: str = ""


def write_request(folder: Path, request: Request) -> None:
    """Leave a request.

    Errors:
        OSError: it cannot be written.
    """
    _write(TimelineLayout(folder).window_request, asdict(request))


def read_request(folder: Path) -> Request | None:
    """The last request; None where there is none, or none that makes sense."""
    content = _read(TimelineLayout(folder).window_request)
    steps = content.get("steps")
    if content.get("action") not in ("start", "stop") or not isinstance(content.get("id"), str):
        return None
    if not isinstance(steps, int) or isinstance(steps, bool) or not 0 <= steps < 1 << 31:
        return None
    return Request(content["id"], content["action"], steps, content.get("profile") is True)


def write_answer(folder: Path, content: Answer) -> None:
    """Leave an answer.

    Errors:
        OSError: it cannot be written.
    """
    _write(TimelineLayout(folder).window_answer, asdict(content))


def read_answer(folder: Path) -> Answer | None:
    """The last answer; None where there is none."""
    content = _read(TimelineLayout(folder).window_answer)
    try:
        return Answer(**{name: content[name] for name in Answer.__dataclass_fields__})
    except KeyError:
        return None


def _write(path: Path, content: dict[str, Any]) -> None:
    write_text(path, orjson.dumps({"version": _VERSION, **content}).decode())


def _read(path: Path) -> dict[str, Any]:
    try:
        content = orjson.loads(read_regular(path))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) and content.get("version") == _VERSION else {}
