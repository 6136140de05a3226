"""Horovod's own Timeline of some steps.

The file is closed when the run ends by an error or a signal. Horovod closes its JSON array with each event and writes
it over with the next, so a killed rank leaves a valid file too, less what the writer, which looks every 10 ms, had not
seen, unless the kill meets the moment in which a tensor's name is first written.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

from hvdtrain.comm.base import Comm, TimelineComm
from hvdtrain.comm.objects import on_rank_0
from hvdtrain.config.windows import Window
from hvdtrain.errors import HvdtrainError
from hvdtrain.observe.trace_file import free_path
from hvdtrain.run_layout import TimelineLayout

_OPEN = "on"
"""In the name of a file whose last step nobody knows yet."""


class Writer(Protocol):
    """The thread that writes it, where it spins from Horovod's start to its end (`runtime.threads.Spinner`)."""

    def rest(self, *, for_good: bool) -> None:
        """Run only where nothing else does."""
        ...

    def work(self) -> None:
        """Run as others do."""
        ...


class HorovodTimeline:
    """Records one window of steps of this start of the run: opened before its first step, closed after its last.

    The file, ``RUN/timeline/horovod-steps-FIRST-LAST.json``, is a new one in any case, and FIRST is where this start
    of the run came in. Rank 0 writes; the others wait at both ends of the window until it is open or closed, so that
    the file holds every collective of these steps and none of the next. (They wait in broadcasts ``timeline/...``, to
    which they may come before the window opens or closes: of the negotiation of these, and of nothing else, the
    beginning or the end may be missing.) What is done after the last step of the window and before the next one, an
    evaluation say, is in it too.

    Opening and closing each wait for the writer's thread, which Horovod asks every millisecond: 1.1 ms, whether it
    spins or sleeps. One that spins is kept out of the way while it has nothing to do, but only then: up to 0.2 s were
    seen while it was at rest on cores that others filled, and a second at Horovod's shutdown.

    Args:
        comm: the ranks.
        recording: starts and ends it; None on ranks other than 0.
        writer: None on ranks other than 0, and where it sleeps or was not found: it is left as it is then.
        window: the same on all ranks.
        folder: made when needed.
        warn: told once when the Timeline cannot be recorded, which never ends the training.
    """

    def __init__(
        self,
        comm: Comm,
        recording: TimelineComm | None,
        writer: Writer | None,
        window: Window,
        folder: Path,
        warn: Callable[[str], None],
    ) -> None:
        self._comm = comm
        self._recording = recording
        self._writer = writer
        self._window = window
        self._folder = folder
        self._warn = warn
        self._state: Literal["before", "open", "over"] = "before"
        self._path: Path | None = None
        self._first = 0
        self._named_last: int | None = None
        self._rest(for_good=False)

    def begin_step(self, step: int) -> None:
        """Open or close the window where it begins or has ended. Collective: yes."""
        if self._state == "before" and step in self._window:
            self._state = "open"
            on_rank_0(self._comm, partial(self._start, step), name="timeline/open")
        elif self._state != "over" and self._window.is_over(step):
            self._state = "over"
            on_rank_0(self._comm, self._stop, name="timeline/close")
            self._rest(for_good=True)

    def record(self, window: Window) -> None:
        """Record these steps, the first of which is yet to come, or end with them; a window that waits is let go."""
        if self._state == "open":
            self._window = Window(self._window.first, window.last)
        else:
            self._state, self._window = "before", window

    def close(self) -> None:
        """Close the window if it is open, and make the writer's thread ready to be ended."""
        self._stop()
        if self._writer is not None:
            self._writer.work()

    def _start(self, step: int) -> None:
        if self._recording is None:
            return
        self._first, self._named_last = step, self._window.last
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            path = free_path(self._named(step, self._window.last))
            path.open("xb").close()  # Horovod would say of a file that cannot be opened only in its log
            if self._writer is not None:
                self._writer.work()
            try:
                self._recording.start_timeline(path)
            except HvdtrainError:
                path.unlink()
                raise
            self._path = path
        except (OSError, HvdtrainError) as error:
            self._warn(f"Horovod's Timeline is not recorded: {error}; training goes on")

    def _stop(self) -> None:
        if self._recording is None or self._path is None:
            return
        path, self._path = self._path, None
        try:
            self._recording.stop_timeline()
            _check(path)
            if self._window.last not in (None, self._named_last):
                path.rename(free_path(self._named(self._first, self._window.last)))
        except (OSError, HvdtrainError) as error:
            self._warn(f"Horovod's Timeline {path} is not whole: {error}; training goes on")

    def _named(self, first: int, last: int | None) -> Path:
        return TimelineLayout(self._folder).horovod(first, _OPEN if last is None else last)

    def _rest(self, *, for_good: bool) -> None:
        if self._writer is not None:
            self._writer.rest(for_good=for_good)


def _check(path: Path) -> None:
    """See that a closed file ends as it should, as Horovod does not tell when it could not write; remove an empty one.

    Errors:
        OSError: it does not.
    """
    if not path.stat().st_size:
        path.unlink()
        raise OSError("nothing was exchanged, or the disk is full")
    with path.open("rb") as file:
        file.seek(-1, 2)
        if file.read() != b"]":
            raise OSError("it breaks off; is the disk full?")
