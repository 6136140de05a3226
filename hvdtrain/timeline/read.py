"""Reader of Horovod's Timelines: any size, plain or gzip, complete, truncated or damaged.

The file is read in chunks that end between two events. Tensor names come first, because they may hold any text. Then
msgspec decodes the chunk; if that fails, the damaged part is searched object by object. Large columns are on disk, so
memory does not grow with the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hvdtrain.errors import TraceError
from hvdtrain.timeline.columns import HorovodTrace
from hvdtrain.timeline.reading.events import LONGEST_BYTES, NAME_HEAD, unfinished_name
from hvdtrain.timeline.reading.source import read_pieces
from hvdtrain.timeline.reading.trace_builder import TraceBuilder, last_boundary

CHUNK_BYTES = 1 << 20

_FOREIGN_BYTES = 1 << 20
"""Reading stops after this many bytes of another program's events."""

_STRANGE_BYTES = 1 << 27
"""Reading stops after this many bytes without an event of Horovod. A tensor's name may have some MB."""

_OPENING = b"[\n" + NAME_HEAD
"""The first bytes of a Timeline. A file has several where Timelines were concatenated."""

_FIRST_EVENT = b'{"ph": "'


def read_files(paths: Sequence[Path]) -> list[HorovodTrace]:
    """Read the Timelines that the user names.

    Errors:
        TraceError: a file cannot be opened or is no Timeline of Horovod, or none has an event.
    """
    traces = [read_horovod(path) for path in paths]
    if not any(len(trace.phase) or len(trace.tick_us) for trace in traces):
        raise TraceError(
            f"there is no event in {', '.join(map(str, paths))}",
            expected="a Timeline with at least one operation",
            found="; ".join(dict.fromkeys(line for trace in traces for line in trace.dropped)) or None,
            next_step="train some steps, and let the program exit by itself: Horovod writes with a delay",
        )
    return traces


def read_horovod(path: Path, chunk_bytes: int = CHUNK_BYTES) -> HorovodTrace:
    """Read a Timeline that Horovod wrote in any program.

    Returns:
        All that is readable; `dropped` lists the rest. An empty file is an empty Timeline.

    Errors:
        TraceError: it cannot be opened, or is no Timeline of Horovod.
    """
    builder = TraceBuilder()
    rest, offset = b"", 0
    try:
        for piece in read_pieces(path, chunk_bytes, builder.damage.notes):
            text = rest + piece
            used = _add_chunk(builder, text, offset, _chunk_end(text))
            rest, offset = text[used:], offset + used
            if offset > (_FOREIGN_BYTES if builder.damage.foreign else _STRANGE_BYTES) and not builder.is_horovod:
                break
        else:
            offset += _add_chunk(builder, rest, offset, len(rest))
    except OSError as error:
        raise TraceError(
            f"the trace {path} cannot be read",
            found=error.strerror or str(error),
            next_step="check the path and its permissions",
        ) from None
    if not builder.is_horovod:
        _check_empty(path, builder)
    return builder.finish(path, offset)


def _chunk_end(text: bytes) -> int:
    """Return where the last event begins, or metadata that may be incomplete; 0 if there is no such place."""
    end = last_boundary(text, len(text))
    head = unfinished_name(text, end or len(text))
    if head < 0:
        return end
    return head - 2 if text[head - 2 : head] == b"[\n" else head


def _add_chunk(builder: TraceBuilder, text: bytes, offset: int, end: int) -> int:
    """Add the events before `end`; return how many bytes were used."""
    begin, following = 0, text.find(_OPENING, 0, end)
    while following >= 0:
        if text.startswith((b', "ph": "M", "pid": 0,', b', "ph": "M", "pid": 1,'), following + len(_OPENING)):
            builder.add(text[begin:following], offset + begin)
            builder.start_timeline()
            begin = following
        following = text.find(_OPENING, following + 1, end)
    builder.add(text[begin:end], offset + begin)
    if end == 0 and len(text) > 2 * LONGEST_BYTES:
        return builder.add_damaged(text, offset)
    return end


def _check_empty(path: Path, builder: TraceBuilder) -> None:
    """Raise TraceError unless a file without events is one that Horovod began to write."""
    beginning = builder.beginning.lstrip(b" \t\r\n\xef\xbb\xbf")
    rest = beginning.strip(b"[] \t\r\n")
    if not rest:
        builder.damage.notes.append("the file has no events")
    starts = (NAME_HEAD, _FIRST_EVENT)
    if not rest or (beginning[:1] == b"[" and any(start.startswith(rest[: len(start)]) for start in starts)):
        return
    is_foreign = builder.damage.foreign
    raise TraceError(
        f"{path} is not a Timeline of Horovod",
        expected="a JSON array of events, as HOROVOD_TIMELINE=FILE, start_timeline() or --observe.timeline write it",
        found="events of another program" if is_foreign else repr(beginning[:40].decode("utf-8", "replace")),
        next_step="name such a file, or the run's folder: hvdtrain timeline report RUN",
    )
