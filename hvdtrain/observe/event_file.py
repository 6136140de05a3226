"""A file of TensorBoard events. It replaces points that an earlier process wrote for the same steps."""

from __future__ import annotations

import io
import socket
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain.observe.journal import append_whole

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary

_PREFIX = "events.out.tfevents."


class EventFile:
    """Appends summaries by one system call each, so that a killed process loses none.

    torch's `SummaryWriter` does not fit. It writes no session start to the first file, so TensorBoard's Python reader
    ignores the first restart. It names files by the clock alone, so files of a host with a slow clock are read in the
    wrong order. It imports TensorFlow if installed, and has one thread per file.

    Args:
        directory: one run of TensorBoard's; created if missing.
        first_step: readers drop points of this and later steps in earlier files.
    """

    def __init__(self, directory: Path, first_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{_PREFIX}{_stamp(directory):010d}.{socket.gethostname()}.{threading.get_native_id()}"
        self._event = Event
        self._file = path.open("xb", buffering=0)
        self._encoded = io.BytesIO()
        self._records = RecordWriter(self._encoded)
        now = time.time()
        self._write(Event(wall_time=now, file_version="brain.Event:2"))
        # A START event drops later steps of every tag in this folder, also of tags that do not follow.
        self._write(Event(wall_time=now, step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def add(self, summaries: Iterable[Summary], step: int, time_s: float) -> None:
        """Append summaries of `step`; `time_s` is since 1970. Errors: OSError."""
        for summary in summaries:
            self._write(self._event(wall_time=time_s, step=step, summary=summary))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, event: object) -> None:
        """Append a record whole, because readers stop at an incomplete one."""
        self._encoded.seek(0)
        self._encoded.truncate()
        self._records.write(event.SerializeToString())  # type: ignore[attr-defined]
        append_whole(self._file, self._encoded.getvalue())


def _stamp(directory: Path) -> int:
    """Return now in seconds, or later: files are read in order of name, and another host's clock may be ahead."""
    found = [path.name.removeprefix(_PREFIX).partition(".")[0] for path in directory.glob(f"{_PREFIX}*")]
    return max([int(time.time()), *(int(stamp) + 1 for stamp in found if stamp.isdecimal())])
