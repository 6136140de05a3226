"""Two small files by which a command requests a window of traces from a running job.

In ``RUN/timeline/``: the command writes `.window-request.json`, rank 0 answers in `.window-answer.json`. Everybody who
may write into the run folder may request windows. No port is open.
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
    """A request for a window.

    Attributes:
        id: unique.
        action: begin or end a window.
        steps: length of the window; 0 for no end.
        profile: also record torch.profiler.
    """

    id: str
    action: Literal["start", "stop"]
    steps: int = 0
    profile: bool = False


@dataclass(frozen=True)
class Answer:
    """The answer to a request.

    Attributes:
        id: of the request.
        state: "seen" by the job; "open": steps are recorded; "over": the files are written; "none": no window.
        first: first step of the window.
        last: last step; None for a window without an end.
        files: of rank 0, once the window is over.
        lacks: what is not recorded, and why.
    """

    id: str
    state: Literal["seen", "open", "over", "none"]
    first: int = 0
    last: int | None = None
    files: Sequence[str] = ()
    lacks: str = ""


def write_request(folder: Path, request: Request) -> None:
    """Write a request.

    Errors:
        OSError: it cannot be written.
    """
    _write(TimelineLayout(folder).window_request, asdict(request))


def read_request(folder: Path) -> Request | None:
    """Return the last request; None without a valid one."""
    content = _read(TimelineLayout(folder).window_request)
    steps = content.get("steps")
    if content.get("action") not in ("start", "stop") or not isinstance(content.get("id"), str):
        return None
    if not isinstance(steps, int) or isinstance(steps, bool) or not 0 <= steps < 1 << 31:
        return None
    return Request(content["id"], content["action"], steps, content.get("profile") is True)


def write_answer(folder: Path, content: Answer) -> None:
    """Write an answer.

    Errors:
        OSError: it cannot be written.
    """
    _write(TimelineLayout(folder).window_answer, asdict(content))


def read_answer(folder: Path) -> Answer | None:
    """Return the last answer; None without one."""
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
