"""Reader of Horovod's Timelines: any size, plain or gzip, complete, truncated or damaged.

The file is read in chunks that end between two events. Tensor names come first, because they may hold any text. Then
msgspec decodes the chunk; if that fails, it is searched object by object. Large columns are on disk, so memory does not
grow with the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from hvdtrain.errors import TraceError
from hvdtrain.timeline.columns import HorovodTrace
from hvdtrain.timeline.reading.events import NAME_HEAD, read_chunks
from hvdtrain.timeline.reading.trace_builder import TraceBuilder

CHUNK_BYTES = 1 << 20
_BEGINNING_BYTES = 256

_FOREIGN_BYTES = 1 << 20
"""Reading stops after this many bytes of another program's events."""

_STRANGE_BYTES = 1 << 27
"""Reading stops after this many bytes without an event of Horovod. A tensor's name may have some MB."""

_FIRST_EVENT = b'{"ph": "'


def read_files(paths: Sequence[Path]) -> list[HorovodTrace]:
    """Read the Timelines that the user names.

    Errors: TraceError: a file cannot be opened or is no Timeline of Horovod, or none has an event.
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


def read_readable(paths: Iterable[Path], notes: list[str]) -> Iterator[HorovodTrace]:
    """Yield the Timelines of a run; `notes` lists files that are none."""
    for path in paths:
        try:
            yield read_horovod(path)
        except TraceError as error:
            notes.append(f"{path.name} is ignored: {error.what}")


def read_horovod(path: Path, chunk_bytes: int = CHUNK_BYTES) -> HorovodTrace:
    """Read a Timeline that Horovod wrote in any program.

    Returns: All that is readable; `dropped` lists the rest. An empty file is an empty Timeline.

    Errors: TraceError: it cannot be opened, or is no Timeline of Horovod.
    """
    builder = TraceBuilder()
    beginning = b""
    try:
        for chunk in read_chunks(path, chunk_bytes, builder.notes):
            beginning += chunk[: _BEGINNING_BYTES - len(beginning)]
            builder.add(chunk)
            most = _FOREIGN_BYTES if builder.is_foreign else _STRANGE_BYTES
            if not builder.is_horovod and builder.size_bytes > most:
                break
    except OSError as error:
        raise unreadable(f"trace {path}", error) from None
    if not builder.is_horovod:
        _check_empty(path, beginning.lstrip(b" \t\r\n\xef\xbb\xbf"), builder)
    return builder.finish(path)


def unreadable(what: str, error: OSError) -> TraceError:
    """Return the error of a file that cannot be read."""
    why = error.strerror or str(error)
    return TraceError(f"the {what} cannot be read", found=why, next_step="check the path and its permissions")


def _check_empty(path: Path, beginning: bytes, builder: TraceBuilder) -> None:
    """Raise TraceError unless a file without events is one that Horovod began to write."""
    rest = beginning.strip(b"[] \t\r\n")
    if not rest:
        builder.notes.append("the file has no events")
    starts = (NAME_HEAD, _FIRST_EVENT)
    if not rest or (beginning[:1] == b"[" and any(start.startswith(rest[: len(start)]) for start in starts)):
        return
    raise TraceError(
        f"{path} is not a Timeline of Horovod",
        expected="a JSON array of events, as HOROVOD_TIMELINE=FILE, start_timeline() or --observe.timeline write it",
        found="events of another program" if builder.is_foreign else repr(beginning[:40].decode("utf-8", "replace")),
        next_step="name such a file, or the run's folder: hvdtrain timeline report RUN",
    )
