"""Windows of traces that are requested while the job runs. All ranks record the same steps.

Two small files in ``RUN/timeline/`` serve for that: a command writes `.window-request.json`, rank 0 answers in
`.window-answer.json`. Everybody who may write into the run folder may request windows. No port is open.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeVar

import msgspec

from hvdtrain.config.windows import OFF, Window
from hvdtrain.files import read_regular, write_text
from hvdtrain.run_layout import TimelineLayout

_POLL_S = 0.5
_ENDED = "the run has ended"
FOREVER = 1 << 40
"""Steps of a window without an end."""


class Request(msgspec.Struct, frozen=True):
    """A request to begin or end a window of `steps`, 0 for no end. `profile`: also record torch.profiler."""

    id: str
    action: Literal["start", "stop"]
    steps: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] = 0
    profile: bool = False
    version: Literal[1] = 1


class Answer(msgspec.Struct, frozen=True):
    """The answer to a request."""

    id: str
    state: Literal["seen", "open", "over", "none"]  # seen by the job; steps are recorded; files are written; no window
    first: int = 0
    last: int | None = None  # last step; None for a window without an end
    files: Sequence[str] = ()  # of rank 0, once the window is over
    lacks: str = ""  # what is not recorded, and why
    version: Literal[1] = 1


_Message = TypeVar("_Message", Request, Answer)


def write_message(folder: Path, message: Request | Answer) -> None:
    """Write a request or an answer. Errors: OSError."""
    write_text(_path(folder, type(message)), msgspec.json.encode(message).decode())


def read_message(folder: Path, kind: type[_Message]) -> _Message | None:
    """Return the last request or answer; None without a valid one."""
    try:
        return msgspec.json.decode(read_regular(_path(folder, kind)), type=kind)
    except (OSError, ValueError, RecursionError):
        return None


def _path(folder: Path, kind: type[Request | Answer]) -> Path:
    layout = TimelineLayout(folder)
    return layout.window_request if kind is Request else layout.window_answer


_Record = Callable[[Window], None]
"""Records later steps, or ends the open window with the last of these steps."""


class Requests:
    """Polls ``RUN/timeline`` for requests in a thread of its own on rank 0, until closed."""

    def __init__(self, folder: Path, every_s: float = _POLL_S) -> None:
        self._folder = folder
        self._every_s = every_s
        self._old = read_message(folder, Request)  # from an earlier start of the run
        self._new: Request | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="window requests", daemon=True)
        self._thread.start()

    def next_request(self) -> Request | None:
        """Return the request since the last call."""
        request, self._new = self._new, None
        return request

    def close(self) -> None:
        """Stop polling."""
        self._ended.set()
        self._thread.join(1.0)

    def poll(self) -> None:
        """Poll once."""
        request = read_message(self._folder, Request)
        if request is not None and request != self._old:
            self._old = request
            with suppress(OSError):
                write_message(self._folder, Answer(request.id, "seen"))
            self._new = request

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            self.poll()


@dataclass
class LiveWindow:
    """Opens and closes windows on all ranks at the same step.

    Each step sums some numbers over ranks (`values`). Rank 0 adds its requests. After the step, every rank acts on
    the sums before the next step.
    """

    NOTICES: ClassVar[int] = 3
    """Numbers per step: length of a window to open, whether to profile it, whether to end it."""

    folder: Path
    requests: Requests | None  # None on ranks other than 0
    recordings: Sequence[_Record]
    profile: _Record
    lacks: str  # what is not recorded here, and why
    say: Callable[[str], None]  # shows a line when a window opens and when it is over
    _window: Window = OFF
    _profiled: bool = False
    _requested_id: str = ""
    _id: str = ""
    _step: int = 0
    _before: dict[Path, int] = field(default_factory=dict)

    def values(self) -> list[int]:
        """Return this rank's numbers for the sums of the next step."""
        request = self.requests.next_request() if self.requests is not None else None
        if request is None:
            return [0] * self.NOTICES
        self._requested_id = request.id
        if request.action == "stop":
            return [0, 0, 1]
        return [request.steps or FOREVER, int(request.profile), 0]

    def on_sums(self, step: int, sums: Sequence[int]) -> None:
        """Act on the sums of step `step`."""
        steps, profile, end = sums
        if steps or end:
            self._id = self._requested_id
        if steps and not (self.recordings or profile):
            self._reply(Answer(self._id, "none", lacks=self.lacks))
        elif steps:
            is_open = self._is_open(step)
            first = self._window.first if is_open else step + 1
            self._profiled = bool(profile) or (is_open and self._profiled)
            if not is_open:
                self._before = self._files()
            self._set(Window(first, None if steps >= FOREVER else step + steps))
            self._reply(Answer(self._id, "open", first, self._window.last, lacks=self.lacks))
            until = "until it is stopped" if self._window.last is None else f"to {self._window.last}"
            self.say(f"recording steps {first} {until} in {self.folder}")
        elif end and self._is_open(step):
            self._set(Window(self._window.first, step))
        elif end:
            self._reply(Answer(self._id, "none"))

    def begin_step(self, step: int) -> None:
        """Report a window as over and written, three steps after its last step."""
        self._step = step
        if self._window and self._window.is_over(step - 2):
            self._end(self._window.last or step)

    def close(self) -> None:
        """Report the window as over. Recordings are already closed."""
        late = None
        if self.requests is not None:
            self.requests.close()
            late = self.requests.next_request()
        if late is not None:
            self._id = late.id
        if self._window and self._window.first <= self._step:
            self._end(self._window.last)
        elif self._window or late is not None:
            self._reply(Answer(self._id, "none", lacks=_ENDED))

    def _is_open(self, step: int) -> bool:
        return bool(self._window) and not self._window.is_over(step)

    def _set(self, window: Window) -> None:
        self._window = window
        for record in (*self.recordings, *([self.profile] if self._profiled else ())):
            record(window)

    def _end(self, last: int | None) -> None:
        window, self._window = self._window, OFF
        grown = sorted(str(path) for path, size in self._files().items() if size != self._before.get(path))
        self._reply(Answer(self._id, "over", window.first, last, grown, self.lacks))
        self.say(f"the recording from step {window.first} is in {self.folder}")

    def _files(self) -> dict[Path, int]:
        """Return the traces in the folder with their sizes, on rank 0."""
        found: dict[Path, int] = {}
        if self.requests is not None:
            with suppress(OSError):  # files may be removed or renamed meanwhile
                for path in self.folder.glob("[!.]*.json"):
                    with suppress(OSError):
                        found[path] = path.stat().st_size
        return found

    def _reply(self, content: Answer) -> None:
        if self.requests is not None:
            with suppress(OSError):
                write_message(self.folder, content)
