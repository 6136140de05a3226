"""A window of traces that is asked for while the job runs: all ranks record the same steps of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from hvdtrain.config.windows import OFF, Window
from hvdtrain.observe.window_files import Answer, Request, read_request, write_answer

_POLL_S = 0.5
_ENDED = "it has ended"
FOREVER = 1 << 40
"""Steps of a window that nobody has given an end."""


class Recording(Protocol):
    """What records windows of steps."""

    def record(self, window: Window) -> None:
        """Record these steps, the first of which is yet to come; or, where they are being recorded, end with them."""
        ...


class Requests:
    """Looks for requests in a thread of its own, on rank 0, until closed.

    Args:
        folder: ``RUN/timeline``.
        every_s: between two looks.
    """

    def __init__(self, folder: Path, every_s: float = _POLL_S) -> None:
        self._folder = folder
        self._every_s = every_s
        self._old = read_request(folder)  # of an earlier start of the run
        self._new: Request | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="window requests", daemon=True)
        self._thread.start()

    def next_request(self) -> Request | None:
        """The request that came since last time."""
        request, self._new = self._new, None
        return request

    def close(self) -> None:
        """Look no more."""
        self._ended.set()
        self._thread.join(1.0)

    def poll(self) -> None:
        """See whether there is a request, once."""
        request = read_request(self._folder)
        if request is not None and request != self._old:
            self._old = request
            with suppress(OSError):
                write_answer(self._folder, Answer(request.id, "seen"))
            self._new = request

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            self.poll()


class LiveWindow:
    """Opens and closes windows where all ranks have agreed on it.

    Rank 0 puts what was asked of it into the numbers that are summed over ranks in each step (`notices`); once a step
    has summed them, every rank acts on them before the next one.

    Args:
        folder: ``RUN/timeline``.
        requests: None on ranks other than 0.
        recordings: of spans and Horovod's Timeline.
        profile: of torch.profiler.
        lacks: what is not recorded here, and why.
        say: told when a window opens and when it is over.
    """

    NOTICES = 3
    """Numbers a step: steps of a window to open, whether to profile them, whether to end it."""

    def __init__(
        self,
        folder: Path,
        requests: Requests | None,
        recordings: Sequence[Recording],
        profile: Recording,
        lacks: str,
        say: Callable[[str], None],
    ) -> None:
        self._folder = folder
        self._requests = requests
        self._recordings = recordings
        self._profile = profile
        self._lacks = lacks
        self._say = say
        self._window = OFF
        self._profiled = False
        self._taken = self._id = ""
        self._step = 0
        self._before: dict[Path, int] = {}

    def notices(self) -> list[int]:
        """What this rank puts into the sums of the step that comes."""
        request = self._requests.next_request() if self._requests is not None else None
        if request is None:
            return [0] * self.NOTICES
        self._taken = request.id
        if request.action == "stop":
            return [0, 0, 1]
        return [request.steps or FOREVER, int(request.profile), 0]

    def agreed(self, step: int, notices: Sequence[int]) -> None:
        """Step `step` has summed what the ranks put into it: act on it."""
        steps, profile, end = notices
        if steps or end:
            self._id = self._taken
        if steps and not (self._recordings or profile):
            self._reply(Answer(self._id, "none", lacks=self._lacks))
        elif steps:
            is_open = self._is_open(step)
            first = self._window.first if is_open else step + 1
            self._profiled = bool(profile) or (is_open and self._profiled)
            if not is_open:
                self._before = self._files()
            self._set(Window(first, None if steps >= FOREVER else step + steps))
            self._reply(Answer(self._id, "open", first, self._window.last, lacks=self._lacks))
            until = "until it is stopped" if self._window.last is None else f"to {self._window.last}"
            self._say(f"steps {first} {until} are recorded in {self._folder}")
        elif end and self._is_open(step):
            self._set(Window(self._window.first, step))
        elif end:
            self._reply(Answer(self._id, "none"))

    def begin_step(self, step: int) -> None:
        """Say it where a window is over and written: three steps after its last one."""
        self._step = step
        if self._window and self._window.is_over(step - 2):
            self._end(self._window.last or step)

    def close(self) -> None:
        """No step comes any more; recordings are closed."""
        late = None
        if self._requests is not None:
            self._requests.close()
            late = self._requests.next_request()
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
        for recording in (*self._recordings, *([self._profile] if self._profiled else ())):
            recording.record(window)

    def _end(self, last: int | None) -> None:
        window, self._window = self._window, OFF
        grown = sorted(str(path) for path, size in self._files().items() if size != self._before.get(path))
        self._reply(Answer(self._id, "over", window.first, last, grown, self._lacks))
        self._say(f"the window that began at step {window.first} is in {self._folder}")

    def _files(self) -> dict[Path, int]:
        """Traces in the folder, with their sizes, for rank 0's answer."""
        found: dict[Path, int] = {}
        if self._requests is not None:
            with suppress(OSError):  # what was there a moment ago may be gone, or be called otherwise
                for path in self._folder.glob("[!.]*.json"):
                    with suppress(OSError):
                        found[path] = path.stat().st_size
        return found

    def _reply(self, content: Answer) -> None:
        if self._requests is not None:
            with suppress(OSError):
                write_answer(self._folder, content)
