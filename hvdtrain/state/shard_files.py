"""How several ranks write one checkpoint: each writes some tensors. They communicate only through files in its folder.

::

    checkpoints/.writing-step-000100-NONCE-PID-HOST/     made by rank 0
        wanted-00001                  by rank 0, one for each other writer
        model-00002-of-00002.safetensors ...             by that writer, each fsynced
        shard-00001.json              by that writer, last and complete or not at all: size and checksum of its files
        failed-00001-ENOSPC           `wanted-00001` renamed by that writer, which needs no space on a full disk

Rank 0 waits for a report of each writer, writes the manifest and renames the folder. No collective is involved, so
threads can do all of it. The nonce keeps a slow writer out of the folder of the next attempt.
"""

from __future__ import annotations

import errno
import heapq
import json
import os
import re
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from torch import Tensor

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import allgather_json, on_rank_0
from hvdtrain.files import fsync, write_text
from hvdtrain.state.pieces import StateDict
from hvdtrain.state.stored_file import FileDigest
from hvdtrain.state.tensor_file import read_header, write_tensors

MIN_BYTES = 32 << 20  # fewer bytes are not worth a file of their own

TIMEOUT_S = 120.0  # seconds without any change in the folder after which rank 0 gives up

_POLL_S = (0.01, 0.5)  # first and longest interval between two looks into the folder

_NAME = re.compile(r"\.writing-step-\d+-[0-9a-f]+-(\d+)-(.+)")
_SILENT_S = 900.0  # a temporary folder of another host without changes for this long is abandoned

INDEX = "model.safetensors.index.json"


class Abandoned(Exception):
    """The checkpoint is no longer needed."""


def count_writers(total_bytes: int, ranks: int, min_bytes: int = MIN_BYTES) -> int:
    """Return how many ranks write `total_bytes`. These are the first ranks, from 0 on."""
    return max(1, min(ranks, total_bytes // max(1, min_bytes)))


def select_shard(state: StateDict, number: int, count: int) -> StateDict:
    """Return the tensors that writer `number` of `count` writes. Every rank gets the same plan for the same shapes.

    The largest tensors are assigned first, each to the writer with the fewest bytes. A piece that only some ranks hold
    is written by the first of them. A shard has no plain values. Groups without tensors belong to writer 0.
    """
    every = [
        (-tensor.nbytes, group, name)
        for group, tensors in state.tensors.items()
        for name, tensor in tensors.items()
        if (group, name) not in state.places
    ]
    loads = [(0, writer) for writer in range(count)]
    own: dict[str, dict[str, Tensor]] = {group: {} for group in state.tensors} if number == 0 else {}
    for minus_bytes, group, name in sorted(every):
        load, writer = heapq.heappop(loads)
        heapq.heappush(loads, (load - minus_bytes, writer))
        if writer == number:
            own.setdefault(group, {})[name] = state.tensors[group][name]
    pieces = state.pieces_of(number)
    for piece in pieces:
        own.setdefault(piece.group, {})[piece.name] = piece.tensor
    return StateDict(own, {}, {(piece.group, piece.name): piece.place for piece in pieces})


def shard_file_name(group: str, number: int, count: int) -> str:
    """Return the file name of a group's tensors. `file_group` is the inverse."""
    return f"{group}.safetensors" if count == 1 else f"{group}-{number + 1:05d}-of-{count:05d}.safetensors"


def file_group(name: str) -> str:
    """Return the group of the tensors in a file."""
    stem = name.removesuffix(".safetensors")
    group, separator, rest = stem.rpartition("-of-")
    return group.rpartition("-")[0] if separator and rest.isdigit() else stem


def request_shards(folder: Path, count: int) -> None:
    """On rank 0, before any rank writes: request the parts of writers 1 to `count` - 1. Errors: OSError."""
    for number in range(1, count):
        (folder / f"wanted-{number:05d}").touch()


def write_shard(
    folder: Path, number: int, count: int, state: StateDict, progress: Callable[[], None]
) -> dict[str, FileDigest]:
    """Write the tensors of writer `number` of `count` to disk, and return the digests of the files. Errors: OSError."""
    files = {}
    for group, tensors in state.tensors.items():
        name = shard_file_name(group, number, count)
        places = {tensor: place for (of, tensor), place in state.places.items() if of == group}
        files[name] = write_tensors(folder / name, tensors, progress, places)
        progress()
    for name in files:  # after all writes, so that the disk is busy with the first while the last is written
        fsync(folder / name)
        progress()
    return files


@dataclass(frozen=True)
class ShardedWrite:
    """One attempt of a rank to write its part of a checkpoint. Runs in any thread, without collectives."""

    folder: Path  # the temporary folder
    step: int  # optimizer steps done
    count: int  # number of writers, including this rank
    own_state: Callable[[], StateDict]  # returns this rank's tensors, with the values of the whole state
    others: int  # number of tensors that the other ranks write
    notes: Mapping[str, Any]  # values for the manifest
    keep: int | None  # number of newest checkpoints to keep; None for all

    def write_on_other_rank(self, number: int, progress: Callable[[], None]) -> None:
        """Write as rank `number`, which is not 0, and report to rank 0, also an error.

        Errors: Abandoned: the checkpoint is no longer needed.
        """
        try:
            state = self.own_state()
            files = write_shard(self.folder, number, self.count, state, progress)
            digests = {name: asdict(digest) for name, digest in files.items()}
            report = {"step": self.step, "tensors": state.count, "files": digests}
            write_text(self.folder / f"shard-{number:05d}.json", json.dumps(report))
        except Abandoned:
            raise
        except Exception as error:
            name = errno.errorcode.get((error.errno if isinstance(error, OSError) else None) or errno.EIO, "EIO")
            with suppress(OSError):
                (self.folder / f"wanted-{number:05d}").rename(self.folder / f"failed-{number:05d}-{name}")

    def gather(
        self, progress: Callable[[], None], abandoned: threading.Event, timeout_s: float = TIMEOUT_S
    ) -> dict[str, FileDigest]:
        """On rank 0: wait for the other writers, remove their reports, and return the digests of their files.

        Calls `progress` after each change in the folder. For `timeout_s` see `TIMEOUT_S`.

        Errors: OSError: a writer failed or timed out; Abandoned: `abandoned` was set.
        """
        waited_s, poll_s, before = 0.0, _POLL_S[0], None
        while True:
            now = _file_sizes(self.folder)
            for name in now:
                if name.startswith("failed-"):
                    _, rank, code = name.split("-", 2)
                    number: int = getattr(errno, code, errno.EIO)
                    raise OSError(number, f"{os.strerror(number)} (rank {int(rank)})")
            missing = [number for number in range(1, self.count) if f"shard-{number:05d}.json" not in now]
            if not missing:
                return self._collect_reports()
            if now != before:
                waited_s, before = 0.0, now
                progress()
            if waited_s > timeout_s:
                raise OSError(errno.ETIMEDOUT, f"rank {missing[0]} has not written its part for {waited_s:.0f} s")
            if abandoned.wait(poll_s):
                raise Abandoned
            waited_s, poll_s = waited_s + poll_s, min(2 * poll_s, _POLL_S[1])

    def _collect_reports(self) -> dict[str, FileDigest]:
        files: dict[str, FileDigest] = {}
        found = 0
        for number in range(1, self.count):
            report = json.loads((self.folder / f"shard-{number:05d}.json").read_text())
            if report["step"] != self.step:
                raise OSError(errno.ESTALE, f"rank {number} has written step {report['step']} instead of {self.step}")
            found += report["tensors"]
            files |= {name: FileDigest(**digest) for name, digest in report["files"].items()}
        if found != self.others:
            raise OSError(errno.ESTALE, f"the other ranks have written {found} tensors instead of {self.others}")
        for name, digest in files.items():
            with (self.folder / name).open("rb") as file:  # opening it makes a network file system update its size
                if os.fstat(file.fileno()).st_size != digest.size_bytes:
                    raise OSError(errno.EIO, f"the size of {name} has changed since it was written")
        for number in range(1, self.count):
            (self.folder / f"wanted-{number:05d}").unlink()
            (self.folder / f"shard-{number:05d}.json").unlink()
        fsync(self.folder)
        return files


def _file_sizes(folder: Path) -> dict[str, int]:
    with os.scandir(folder) as entries:
        sizes = {}
        for entry in entries:
            with suppress(FileNotFoundError):  # renamed since it was listed
                sizes[entry.name] = entry.stat().st_size
        return sizes


def temporary_name(step: int) -> str:
    """Return a new name for a temporary folder, with the step, this process and this host."""
    return f".writing-step-{step:06d}-{secrets.token_hex(4)}-{os.getpid()}-{socket.gethostname()}"


def discard(folder: Path) -> None:
    """Remove a temporary folder. It is renamed first, so that other ranks create no more files in it."""
    renamed = folder.with_name(f".removing-{folder.name}")
    with suppress(OSError):
        folder.rename(renamed)
    for path in (renamed, folder):
        shutil.rmtree(path, ignore_errors=True)


def is_being_written(folder: Path) -> bool:
    """Return whether a running process, including this one, writes to a temporary folder."""
    match = _NAME.fullmatch(folder.name)
    if match is None:
        return False
    if match[2] == socket.gethostname():
        return Path(f"/proc/{match[1]}").exists()
    with suppress(OSError):
        return time.time() - max(path.stat().st_mtime for path in (folder, *folder.iterdir())) < _SILENT_S
    return False


def is_folder_shared(comm: Comm, folder: Path | None) -> bool:
    """Return whether there are other ranks, and all see the files that rank 0 writes to `folder`. Collective: yes.

    `folder` exists on rank 0, and is ignored elsewhere.
    """
    if comm.size == 1:
        return False

    def make_probe() -> str:
        assert folder is not None
        with suppress(OSError):  # a full disk: each save reports it
            return stack.enter_context(NamedTemporaryFile(prefix=".shared-", dir=folder.resolve())).name
        return ""

    with ExitStack() as stack:  # removes the file, also if a rank is lost meanwhile
        probe = on_rank_0(comm, make_probe, name="shared/file")
        return all(allgather_json(comm, bool(probe) and Path(probe).exists(), name="shared/seen"))


def index_of(folder: Path, files: Iterable[str]) -> dict[str, bytes]:
    """Return the content of the index by its name, for the tensors of the model in `files`.

    Nothing if one file has them all, and nothing if a tensor is divided over files: other programs would take a piece
    for the whole. Without an index, transformers refuses to load several files.

    Errors: OSError.
    """
    shards = sorted(name for name in files if name.endswith(".safetensors") and file_group(name) == "model")
    if len(shards) < 2:
        return {}
    places: dict[str, str] = {}
    total_bytes = 0
    for name in shards:
        entries, pieces = read_header(folder / name)
        if pieces:
            return {}
        places |= dict.fromkeys(entries, name)
        total_bytes += sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in entries.values())
    content = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(places.items()))}
    return {INDEX: json.dumps(content, indent=1).encode()}
