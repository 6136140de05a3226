"""``RUN/ledger/``: which samples each rank has drawn for each step, a file a start and rank.

A file's first line says what the start is (`Head`); each line after it is one step of the rank:
``[step, [[begin, end], ...], checksum]``: ranges of positions, merged, and the CRC-32 of the indices into the data set
(int64, little endian) that the loader drew for them. A line stands before its rank takes part in the step's exchange:
so every step that any state holds is told of by all its ranks. What counts is what a later start, or a checkpoint,
went on from: a start that begins after step t makes void what earlier ones say of later steps.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import orjson

VERSION = 1
_NAME = re.compile(r"start-(\d{4,})\.rank-(\d{5,})\.jsonl")


@dataclass(frozen=True)
class Head:
    """What a start of a run is: by a command, by a round of an elastic job, or by a roll back.

    Attributes:
        start: its number, counted from 0.
        why: started, round, or rolled_back.
        from_step: the step that it goes on from.
        position: in the stream, after that step.
        size: number of ranks.
        rank: of this file.
        host: where that ran.
        seed: of the order.
        global_batch: samples a step.
        micro_batch: samples a forward pass.
        samples: in an epoch.
        data_id: of the task.
        left_out: ranges [begin, end) of positions that are left out on purpose, in order.
    """

    start: int
    why: str
    from_step: int
    position: int
    size: int
    rank: int
    host: str
    seed: int
    global_batch: int
    micro_batch: int
    samples: int
    data_id: str
    left_out: list[list[int]] = field(default_factory=list)


def file_name(start: int, rank: int) -> str:
    """Of the file of a start and a rank."""
    return f"start-{start:04d}.rank-{rank:05d}.jsonl"


def ledger_files(folder: Path) -> list[tuple[int, int, Path]]:
    """Start, rank and path of each file, in this order; none where there is no folder."""
    paths = folder.iterdir() if folder.is_dir() else []
    matches = [(match, path) for path in paths if (match := _NAME.fullmatch(path.name))]
    return sorted((int(match[1]), int(match[2]), path) for match, path in matches)


def next_start(folder: Path) -> int:
    """The number of the start that comes, by the files in the folder."""
    try:
        return max((start for start, _, _ in ledger_files(folder)), default=-1) + 1
    except OSError:
        return 0


class Ledger:
    """Appends a rank's lines, each by one call to the kernel, so that a killed process loses none.

    A disk that fails costs the ledger, not the training: it is told once.

    Args:
        folder: `RUN/ledger`; made when the first start begins.
        warn: told where it ends.
    """

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        self.folder = folder
        self._warn = warn
        self._file: int | None = None
        self._ranges: list[list[int]] = []
        self._checksum = 0

    def begin(self, head: Head) -> None:
        """A start of the run begins; lines are its own from now on."""
        self.close()
        self._clear()
        path = self.folder / file_name(head.start, head.rank)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            self._failed(error)
            return
        self._append(orjson.dumps({"version": VERSION, **asdict(head)}, option=orjson.OPT_APPEND_NEWLINE))

    def drew(self, begin: int, end: int, indices: bytes) -> None:
        """The loader has drawn the samples at positions [begin, end): their indices as int64."""
        if self._ranges and self._ranges[-1][1] == begin:
            self._ranges[-1][1] = end
        else:
            self._ranges.append([begin, end])
        self._checksum = zlib.crc32(indices, self._checksum)

    def write(self, step: int) -> None:
        """Tell of step `step` what was drawn since the last one; before this rank has its part in the exchange."""
        if self._file is not None:
            ranges = ",".join([f"[{begin},{end}]" for begin, end in self._ranges])
            self._append(f"[{step},[{ranges}],{self._checksum}]\n".encode())
        self._clear()

    def sync(self) -> None:
        """Wait until all of it is on the disk: before a checkpoint is that counts on it."""
        if self._file is not None:
            try:
                os.fsync(self._file)
            except OSError as error:
                self._failed(error)

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                os.close(file)

    def _clear(self) -> None:
        self._ranges = []
        self._checksum = 0

    def _append(self, line: bytes) -> None:
        assert self._file is not None
        try:
            if os.write(self._file, line) < len(line):
                raise OSError("no room for a whole line")
        except OSError as error:
            self._failed(error)

    def _failed(self, error: OSError) -> None:
        self.close()
        self._warn(
            f"the ledger in {self.folder} ends here: {error.strerror or error}; training goes on, but hvdtrain verify"
            " data will not be able to prove what these steps took"
        )
