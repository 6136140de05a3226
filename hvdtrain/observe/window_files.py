"""Two small files by which a command requests a window of traces from a running job.

In ``RUN/timeline/``: the command writes `.window-request.json`, rank 0 answers in `.window-answer.json`. Everybody who
may write into the run folder may request windows. No port is open.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec

from hvdtrain.files import read_regular, write_text
from hvdtrain.run_layout import TimelineLayout

_Content = TypeVar("_Content", bound=msgspec.Struct)


class Request(msgspec.Struct, frozen=True):
    """A request for a window.

    Attributes:
        action: begin or end a window.
        steps: length of the window; 0 for no end.
        profile: also record torch.profiler.
    """

    id: str
    action: Literal["start", "stop"]
    steps: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] = 0
    profile: bool = False
    version: Literal[1] = 1


class Answer(msgspec.Struct, frozen=True):
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
    version: Literal[1] = 1


def write_request(folder: Path, request: Request) -> None:
    """Write a request. Errors: OSError."""
    write_text(TimelineLayout(folder).window_request, msgspec.json.encode(request).decode())


def read_request(folder: Path) -> Request | None:
    """Return the last request; None without a valid one."""
    return _read(TimelineLayout(folder).window_request, Request)


def write_answer(folder: Path, answer: Answer) -> None:
    """Write an answer. Errors: OSError."""
    write_text(TimelineLayout(folder).window_answer, msgspec.json.encode(answer).decode())


def read_answer(folder: Path) -> Answer | None:
    """Return the last answer; None without a valid one."""
    return _read(TimelineLayout(folder).window_answer, Answer)


def _read(path: Path, kind: type[_Content]) -> _Content | None:
    try:
        return msgspec.json.decode(read_regular(path), type=kind)
    except (OSError, ValueError, RecursionError):
        return None
