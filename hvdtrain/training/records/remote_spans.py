"""Span files of ranks on hosts that do not share the run folder, brought to rank 0 when a run has ended well."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import torch

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import allgather_json, broadcast_json
from hvdtrain.durable import write_text
from hvdtrain.observe.trace_file import free_path
from hvdtrain.run_layout import TimelineLayout

MOST_BYTES = 8 << 20
"""Of one rank's file; what comes later is left out."""

MOST_TOGETHER_BYTES = 256 << 20
"""Of all files, which every rank gets, packed to about a tenth."""

_HEAD_BYTES = 1024
"""Of a file, among them the rank and when it began by its clock: no other file has the same."""


def bring_spans(comm: Comm, folder: Path, warn: Callable[[str], None]) -> None:
    """Let rank 0 have the newest span file of each rank in its own `folder`. Collective: yes; when they are closed.

    A file that rank 0 sees is left alone. What cannot be read or written is a warning there, and the file stays where
    it is.
    """
    if comm.size == 1:
        return
    # First, what other ranks may come to while rank 0 still closes Horovod's Timeline (see `HorovodTimeline`).
    broadcast_json(comm, None, name="timeline/closed")
    mine = _newest(folder, comm.rank)
    everyone = allgather_json(comm, [mine.name, _mark(mine)] if mine else None, name="timeline/files")
    unseen = [r for r, told in enumerate(everyone) if told and not _is_seen(folder, *told)] if comm.rank == 0 else []
    far = broadcast_json(comm, unseen, name="timeline/far")
    if not far:
        return
    most = min(MOST_BYTES, MOST_TOGETHER_BYTES // len(far))
    content = _packed(mine, most) if comm.rank in far and mine else b""
    data = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    lengths = allgather_json(comm, len(data), name="timeline/lengths")
    came = torch.split(comm.allgather(data, name="timeline/contents").wait(), lengths)
    if comm.rank != 0:
        return
    for rank in far:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            text = zlib.decompress(came[rank].numpy().tobytes()).decode()
            write_text(free_path(TimelineLayout(folder).spans(rank)), text)
        except (OSError, zlib.error) as error:
            warn(f"the trace of rank {rank} stays on its host, in {folder}: {error}")


def whole_lines(content: bytes, most: int) -> bytes:
    """A trace of at most about `most` bytes that is valid too: its first lines, each of which is an event."""
    if len(content) <= most:
        return content
    return content[: content.rindex(b",\n", 0, most)] + b"\n]\n"


def _newest(folder: Path, rank: int) -> Path | None:
    try:
        first = TimelineLayout(folder).spans(rank)
        files = [first, *folder.glob(f"{first.stem}-*.json")]
        return max((path for path in files if path.exists()), key=lambda path: path.stat().st_mtime_ns, default=None)
    except OSError:
        return None


def _mark(path: Path) -> str:
    """What tells this file from others; empty where it cannot be read."""
    try:
        with path.open("rb") as file:
            return sha256(file.read(_HEAD_BYTES)).hexdigest()
    except OSError:
        return ""


def _is_seen(folder: Path, name: str, mark: str) -> bool:
    return _mark(folder / name) == mark


def _packed(path: Path, most: int) -> bytes:
    """Empty where it cannot be read, which unpacks to an error."""
    try:
        return zlib.compress(whole_lines(path.read_bytes(), most), 1)
    except (OSError, ValueError):
        return b""
