"""``RUN/ledger/``: the samples that each rank used in each step, one file per start and rank.

The first line of a file describes the start (`StartHeader`). Each further line is one step of the rank:
``[step, [[begin, end], ...], checksum]``: merged ranges of positions, and the CRC-32 of the indices into the data set
(int64, little endian) that the loader read at them. A rank writes the line before it takes part in the step's exchange,
so all ranks have a line for each step that is in any state. A start that resumes after step t invalidates the lines of
earlier starts for later steps.
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
class StartHeader:
    """Description of a start: of a command, a round of an elastic job, or a roll back."""

    start: int  # its number, counted from 0
    why: str  # started, round, rolled_back, or balanced
    from_step: int  # the step that it resumes from
    position: int  # position in the stream after that step
    size: int  # number of ranks
    rank: int  # rank of this file
    host: str  # host of that rank
    seed: int  # seed of the sample order
    global_batch: int  # samples per step
    micro_batch: int  # samples per forward pass
    samples: int  # samples of the data; those of an epoch if `sources` is empty
    data_id: str  # see `Task`
    left_out: list[list[int]] = field(default_factory=list)  # positions [begin, end) skipped on purpose, in order
    sources: list[list[int]] = field(default_factory=list)  # see `SampleOrder`


def ledger_file_name(start: int, rank: int) -> str:
    """Return the name of the file of a start and a rank."""
    return f"start-{start:04d}.rank-{rank:05d}.jsonl"


def ledger_files(folder: Path) -> list[tuple[int, int, Path]]:
    """List start, rank and path of each file, sorted by start and rank. Empty if there is no folder."""
    paths = folder.iterdir() if folder.is_dir() else []
    matches = [(match, path) for path in paths if (match := _NAME.fullmatch(path.name))]
    return sorted((int(match[1]), int(match[2]), path) for match, path in matches)


def next_start(folder: Path) -> int:
    """Return the number of the next start, from the files in the folder."""
    try:
        return max((start for start, _, _ in ledger_files(folder)), default=-1) + 1
    except OSError:
        return 0


class Ledger:
    """Appends a rank's lines, each with one system call, so that a killed process loses none.

    The first start creates `folder`. If the disk fails, the ledger ends with one warning, and training continues.
    """

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        self.folder = folder
        self._warn = warn
        self._file: int | None = None
        self._ranges: list[list[int]] = []
        self._checksum = 0

    def begin_start(self, header: StartHeader) -> None:
        """Begin the file of a start."""
        self.close()
        self._ranges, self._checksum = [], 0
        path = self.folder / ledger_file_name(header.start, header.rank)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            self._failed(error)
            return
        self._append(orjson.dumps({"version": VERSION, **asdict(header)}, option=orjson.OPT_APPEND_NEWLINE))

    def add_samples(self, begin: int, end: int, indices: bytes) -> None:
        """Record the samples at positions [begin, end), with their indices as int64."""
        if self._ranges and self._ranges[-1][1] == begin:
            self._ranges[-1][1] = end
        else:
            self._ranges.append([begin, end])
        self._checksum = zlib.crc32(indices, self._checksum)

    def write(self, step: int) -> None:
        """Write the samples since the last step as those of `step`. Call it before the exchange of the step."""
        if self._file is not None:
            ranges = ",".join([f"[{begin},{end}]" for begin, end in self._ranges])
            self._append(f"[{step},[{ranges}],{self._checksum}]\n".encode())
        self._ranges, self._checksum = [], 0

    def sync(self) -> None:
        """Wait until all lines are on disk. Call it before a checkpoint of these steps."""
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

    def _append(self, line: bytes) -> None:
        assert self._file is not None
        try:
            if os.write(self._file, line) < len(line):
                raise OSError("no space for a complete line")
        except OSError as error:
            self._failed(error)

    def _failed(self, error: OSError) -> None:
        self.close()
        self._warn(
            f"the ledger in {self.folder} ends here: {error.strerror or error}. Training continues, but hvdtrain verify"
            " data cannot check the samples of the following steps"
        )
