"""Record Horovod's own Timeline of some steps.

The file is closed when the run ends by an error or a signal. Horovod ends the JSON array after each event, and writes
the next event over this end. Thus a killed rank also leaves a valid file. It lacks events of the last 10 ms, the
polling interval of Horovod's writer. It is damaged only if the kill hits the first write of a tensor's name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from hvdtrain.comm.base import Comm, TimelineComm
from hvdtrain.comm.objects import on_rank_0
from hvdtrain.config.windows import Window
from hvdtrain.errors import HvdtrainError
from hvdtrain.observe.span_trace import free_path
from hvdtrain.run_layout import TimelineLayout

_OPEN = "on"
"""Replaces the last step in the name of a file while it is unknown."""


@dataclass
class HorovodTimeline:
    """Records one window of steps of this start of the run: opened before its first step, closed after its last.

    The file ``RUN/timeline/horovod-steps-FIRST-LAST.json`` is always a new one. FIRST is the first step of this start
    in the window. Rank 0 writes the file. The other ranks wait at both ends of the window, so that the file has
    every collective of these steps and none of later ones. They wait in broadcasts ``timeline/...`` and may begin these
    early: only the negotiation of these broadcasts may lack its beginning or end. Work between the last step of the
    window and the next step, such as an evaluation, is in the file too.
    """

    comm: Comm
    recording: TimelineComm | None  # starts and ends the Timeline; None on ranks other than 0
    window: Window  # the same on all ranks
    folder: Path
    warn: Callable[[str], None]  # called once if the Timeline cannot be recorded; training continues
    _state: Literal["before", "open", "over"] = "before"
    _path: Path | None = None

    def begin_step(self, step: int) -> None:
        """Open the window at its first step, close it after its last step. Collective: yes."""
        if self._state == "before" and step in self.window:
            self._state = "open"
            on_rank_0(self.comm, partial(self._start, step), name="timeline/open")
        elif self._state != "over" and self.window.is_over(step):
            self._state = "over"
            on_rank_0(self.comm, self.close, name="timeline/close")

    def _start(self, step: int) -> None:
        if self.recording is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            last = _OPEN if self.window.last is None else self.window.last
            path = free_path(TimelineLayout(self.folder).horovod(step, last))
            path.open("xb").close()  # Horovod reports a file that cannot be opened only in its log
            try:
                self.recording.start_timeline(path)
            except HvdtrainError:
                path.unlink()
                raise
            self._path = path
        except (OSError, HvdtrainError) as error:
            self.warn(f"Horovod's Timeline is not recorded: {error}; training continues")

    def close(self) -> None:
        """Close the window if it is open."""
        if self.recording is None or self._path is None:
            return
        path, self._path = self._path, None
        try:
            self.recording.stop_timeline()
            _check(path)
        except (OSError, HvdtrainError) as error:
            self.warn(f"Horovod's Timeline {path} is incomplete: {error}; training continues")


def _check(path: Path) -> None:
    """Check the end of a closed file, because Horovod does not report failed writes. Remove an empty file.

    Errors: OSError: the file is empty or incomplete.
    """
    if not path.stat().st_size:
        path.unlink()
        raise OSError("nothing was exchanged, or the disk is full")
    with path.open("rb") as file:
        file.seek(-1, 2)
        if file.read() != b"]":
            raise OSError("its end is missing; is the disk full?")
