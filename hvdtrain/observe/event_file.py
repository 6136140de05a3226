"""One file of TensorBoard events, which replaces what an earlier process wrote of the same steps."""

from __future__ import annotations

import errno
import io
import os
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary

_PREFIX = "events.out.tfevents."


class EventFile:
    """Appends summaries; each is handed to the kernel at once, so that a killed process loses none.

    Not torch's `SummaryWriter`: that one writes no start of a session in a first file, without which TensorBoard's
    Python reader ignores the first restart; names files by the clock alone, so that those of a host whose clock is
    behind are read in the wrong order; imports TensorFlow where there is one; and has a thread a file.

    Args:
        directory: one run of TensorBoard's; made if missing.
        first_step: readers drop what earlier files hold of this step and later ones.
    """

    def __init__(self, directory: Path, first_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{_PREFIX}{_stamp(directory):010d}.{socket.gethostname()}.{os.getpid()}"
        self._event = Event
        self._file = path.open("xb", buffering=0)
        self._encoded = io.BytesIO()
        self._records = RecordWriter(self._encoded)
        now = time.time()
        self._write(Event(wall_time=now, file_version="brain.Event:2"))
        # A START event drops later steps of every tag in this folder, not only of those that follow.
        self._write(Event(wall_time=now, step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def add(self, summaries: Iterable[Summary], step: int, time_s: float) -> None:
        """Append what belongs to `step`; `time_s` since the epoch. Errors: OSError."""
        for summary in summaries:
            self._write(self._event(wall_time=time_s, step=step, summary=summary))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, event: object) -> None:
        """Append a record, or nothing of it: readers give a file up at the first that is not whole."""
        self._encoded.seek(0)
        self._encoded.truncate()
        self._records.write(event.SerializeToString())  # type: ignore[attr-defined]
        content = self._encoded.getvalue()
        written = self._file.write(content)
        if written < len(content):
            self._file.truncate(self._file.seek(-written, os.SEEK_END))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _stamp(directory: Path) -> int:
    """Now in seconds, or later: files are read in the order of their names, and another host's clock may be ahead."""
    found = [path.name.removeprefix(_PREFIX).partition(".")[0] for path in directory.glob(f"{_PREFIX}*")]
    return max([int(time.time()), *(int(stamp) + 1 for stamp in found if stamp.isdecimal())])
