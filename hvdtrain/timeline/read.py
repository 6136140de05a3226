"""Horovod's Timeline, read into columns: any size, gzip'd or not, whole, broken off or damaged.

The file is looked at a few MiB at a time. Of each such chunk the tensors' names come first, since they may hold
anything (`reading.naming`); then what Horovod's writer wrote, by array operations (`reading.written`); then what is
left between, as JSON (`reading.salvage`). Beginnings and ends are put together while it goes on (`reading.pairs`), and
the columns grow on the disk where they get large (`reading.growing`), so that memory does not grow with the file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from hvdtrain.errors import TraceError
from hvdtrain.timeline.columns import HorovodTrace
from hvdtrain.timeline.reading import tensor_names as naming
from hvdtrain.timeline.reading import written
from hvdtrain.timeline.reading.chunk import Intake
from hvdtrain.timeline.reading.source import pieces

CHUNK_BYTES = 1 << 22

_FOREIGN_BYTES = 1 << 20
_STRANGE_BYTES = 1 << 27
"""After so much without an event of Horovod the rest is not looked at: of other programs' events, and of anything else,
such as a tensor's name of some MB."""

_OPENING = b"[\n" + naming.HEAD
_NEXT = re.compile(rb'\[\n\{"name": "process_name", "ph": "M", "pid": [01],')
"""A Timeline begins: more than one where files were put one behind the other."""


def read_files(paths: Sequence[Path]) -> list[HorovodTrace]:
    """Read the Timelines that somebody names.

    Errors:
        TraceError: one cannot be opened, or is no Timeline of Horovod; there is not one event in all of them.
    """
    found = [read_horovod(path) for path in paths]
    if not any(len(trace.phase) or len(trace.tick_us) for trace in found):
        raise TraceError(
            f"there is no event in {', '.join(map(str, paths))}",
            expected="a Timeline that Horovod has written some operations into",
            found="; ".join(dict.fromkeys(line for trace in found for line in trace.dropped)) or None,
            next_step="let the program do some steps, and end it by itself: Horovod writes late",
        )
    return found


def read_horovod(path: Path, chunk_bytes: int = CHUNK_BYTES) -> HorovodTrace:
    """Read a Timeline of Horovod, of any program.

    Args:
        path: the file.
        chunk_bytes: how much is looked at together.

    Returns:
        All that can be read; `dropped` says what could not. An empty file is an empty Timeline.

    Errors:
        TraceError: it cannot be opened, or is no Timeline of Horovod.
    """
    intake = Intake()
    rest, offset = b"", 0
    try:
        for piece in pieces(path, chunk_bytes, intake.damage.notes):
            text = rest + piece
            done = _feed(intake, text, offset, final=False)
            rest, offset = text[done:], offset + done
            if offset > (_FOREIGN_BYTES if intake.damage.foreign else _STRANGE_BYTES) and not intake.is_horovod:
                break
        else:
            _feed(intake, rest, offset, final=True)
            offset += len(rest)
    except OSError as error:
        raise TraceError(
            f"the trace {path} cannot be read", found=error.strerror or str(error), next_step="check path and rights"
        ) from None
    if not intake.is_horovod:
        _check_empty(path, intake)
    return intake.finish(path, offset)


def _feed(intake: Intake, text: bytes, offset: int, *, final: bool) -> int:
    """Take in the events of `text` that are whole, or all of it; how many bytes that was."""
    end = len(text) if final else _cut(text)
    begin = 0
    view = memoryview(text)
    while (following := _next(text, begin + 1, end)) >= 0:
        intake.add(view[begin:following], offset + begin, final=True)
        intake.begin_another()
        begin = following
    return begin + intake.add(view[begin:end], offset + begin, final=final or end < len(text))


def _next(text: bytes, begin: int, end: int) -> int:
    """Where the next Timeline begins; -1 where none does."""
    at = text.find(_OPENING, begin, end)
    while at >= 0 and not _NEXT.match(text, at):
        at = text.find(_OPENING, at + 1, end)
    return at


def _cut(text: bytes) -> int:
    """Where the last event of Horovod's form begins, or the metadata before it; all of it where there is none."""
    last = text.rfind(written.START)
    end = last if last > 0 else len(text)
    head = text.rfind(naming.HEAD, 0, end)
    unfinished = head >= 0 and end - head < naming.LONGEST and not naming.is_whole(text, head, end)
    return head if unfinished else end


def _check_empty(path: Path, intake: Intake) -> None:
    """See that a file without events is one that Horovod began to write.

    Errors:
        TraceError: it is not.
    """
    beginning = intake.beginning.lstrip(b" \t\r\n\xef\xbb\xbf")
    rest = beginning.strip(b"[] \t\r\n")
    if not rest:
        intake.damage.notes.append("the file holds no events")
    if not rest or (beginning[:1] == b"[" and any(s.startswith(rest[: len(s)]) for s in (naming.HEAD, written.START))):
        return
    what = "events of another program" if intake.damage.foreign else repr(beginning[:40].decode("utf-8", "replace"))
    raise TraceError(
        f"{path} is not a Timeline of Horovod",
        expected="a JSON array of events, as HOROVOD_TIMELINE=FILE, start_timeline() or --observe.timeline write it",
        found=what,
        next_step="name such a file, or the run's folder: hvdtrain timeline report RUN",
    )
