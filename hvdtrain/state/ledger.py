"""``RUN/ledger/``: the samples that each rank used in each step, one file per host.

The first line of each start of a rank describes it (`StartHeader`). Each further line is one step of the rank:
``[start, rank, step, [[begin, end], ...], checksum]``: merged ranges of positions, and the CRC-32 of the indices into
the data set (int64, little endian) that the loader read at them. A rank writes the line before it takes part in the
step's exchange, so all ranks have a line for each step that is in any state. A start that resumes after step t
invalidates the lines of earlier starts for later steps.

The ranks of a host append to its file. Each line begins with a line break, so that one that a kill has cut off damages
no other rank's.
"""

from __future__ import annotations

import os
import re
import socket
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import orjson

from hvdtrain.runtime.clock import clock_id

VERSION = 2
_TAIL_BYTES = 1 << 16
_UNWRITTEN_BYTES = 1 << 24  # more lines do not wait in memory
_START = re.compile(rb'\n(?:\[|\{"version":2,"start":)(\d+),')


@dataclass(frozen=True)
class StartHeader:
    """Description of a start: of a command, a round of an elastic job, or a roll back."""

    start: int  # its number, counted from 0
    why: str  # started, round, rolled_back, or balanced
    from_step: int  # the step that it resumes from
    position: int  # position in the stream after that step
    size: int  # number of ranks
    rank: int  # rank of these lines
    host: str  # its host
    seed: int  # seed of the sample order
    global_batch: int  # samples per step
    micro_batch: int  # samples per forward pass
    samples: int  # samples of the data; those of an epoch if `sources` is empty
    data_id: str  # see `Task`
    left_out: list[list[int]] = field(default_factory=list)  # positions [begin, end) skipped on purpose, in order
    sources: list[list[int]] = field(default_factory=list)  # see `SampleOrder`


def ledger_file_name() -> str:
    """Return the name of this host's file, which no other host of this name has."""
    host = re.sub(r"[^\w.-]", "_", socket.gethostname())
    return f"{host}-{zlib.crc32(clock_id().encode()):08x}.jsonl"


def ledger_files(folder: Path) -> list[Path]:
    """List the files. Empty if there is no folder."""
    return sorted(folder.glob("*.jsonl"))


def next_start(folder: Path) -> int:
    """Return the number of the next start, from the last lines of each host."""
    numbers = [-1]
    try:
        for path in ledger_files(folder):
            with path.open("rb") as file:
                file.seek(-min(_TAIL_BYTES, file.seek(0, os.SEEK_END)), os.SEEK_END)
                numbers += map(int, _START.findall(file.read()))
    except OSError:
        return 0
    return max(numbers) + 1


class Ledger:
    """Appends a rank's lines, each with one system call, so that a killed process loses none.

    The first start creates `folder`. While the disk fails, the lines wait in memory, and each later line tries again.
    The first failure is a warning, and training continues.
    """

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        self.folder = folder
        self._warn = warn
        self._file: int | None = None
        self._of = b""  # start and rank of the lines; empty while there is no start
        self._ranges: list[list[int]] = []
        self._checksum = 0
        self._unwritten = bytearray()  # whole lines
        self._has_failed = False

    def begin_start(self, header: StartHeader) -> None:
        """Begin a start."""
        self.close()
        self._ranges, self._checksum, self._of = [], 0, b"%d,%d" % (header.start, header.rank)
        self._append(orjson.dumps({"version": VERSION, **asdict(header)}))

    def add_samples(self, begin: int, end: int, indices: bytes) -> None:
        """Record the samples at positions [begin, end), with their indices as int64."""
        if self._ranges and self._ranges[-1][1] == begin:
            self._ranges[-1][1] = end
        else:
            self._ranges.append([begin, end])
        self._checksum = zlib.crc32(indices, self._checksum)

    def write(self, step: int) -> None:
        """Write the samples since the last step as those of `step`. Call it before the exchange of the step."""
        if self._of:
            ranges = ",".join([f"[{begin},{end}]" for begin, end in self._ranges])
            self._append(b"[%b,%d,[%b],%d]" % (self._of, step, ranges.encode(), self._checksum))
        self._ranges, self._checksum = [], 0

    def sync(self) -> None:
        """Wait until all lines are on disk. Call it before a checkpoint of these steps."""
        self._write_lines(is_on_disk=True)

    def close(self) -> None:
        """Close the file."""
        self._write_lines()
        file, self._file, self._of = self._file, None, b""
        if file is not None:
            with suppress(OSError):
                os.close(file)

    def _append(self, line: bytes) -> None:
        self._unwritten += b"\n" + line
        self._write_lines()

    def _write_lines(self, is_on_disk: bool = False) -> None:
        if not self._of:
            return
        try:
            if self._file is None:
                self.folder.mkdir(parents=True, exist_ok=True)
                path = self.folder / ledger_file_name()
                self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            if self._unwritten:
                written = os.write(self._file, self._unwritten)
                if written < len(self._unwritten):  # the line that was cut off is written again
                    del self._unwritten[: self._unwritten.rfind(b"\n", 0, written + 1)]
                    raise OSError("no space for a complete line")
                self._unwritten.clear()
            if is_on_disk:
                os.fsync(self._file)
        except OSError as error:
            if len(self._unwritten) > _UNWRITTEN_BYTES:
                self._unwritten.clear()
            if not self._has_failed:
                self._has_failed = True
                self._warn(
                    f"the ledger in {self.folder} cannot be written: {error.strerror or error}. Training continues, and"
                    " its lines are written when the disk accepts them. Without them, hvdtrain verify data cannot check"
                    " the samples of these steps"
                )
