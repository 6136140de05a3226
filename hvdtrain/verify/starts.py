"""Read the starts in a ledger as columns, and find the steps of each that count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import orjson
from numpy.typing import NDArray

from hvdtrain.errors import RunDirectoryError
from hvdtrain.state.ledger import VERSION, StartHeader, ledger_files

_LINES_AT_ONCE = 1 << 16
"""Lines to parse in one call, which is several times as fast as one call per line."""

Ints = NDArray[np.int64]
_Int = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
_Line = tuple[_Int, _Int, _Int, list[tuple[_Int, _Int]], _Int]
"""A start, a rank, its step, the ranges that it used, and their checksum."""
_Columns = list[Ints]
"""Steps, checksums and numbers of ranges [N]; begins and ends of the ranges [M]."""

_decode_lines = msgspec.json.Decoder(list[_Line]).decode


@dataclass(frozen=True)
class Entries:
    """A rank's steps of one start, in the order of the file."""

    header: StartHeader  # those of all ranks should agree
    steps: Ints  # [N]
    checksums: Ints  # checksums of the used indices [N]
    first: Ints  # [N + 1]; step i has the ranges first[i] to first[i + 1]
    begins: Ints  # of the ranges [M]
    ends: Ints  # of the ranges [M]

    def between(self, first: int, last: int) -> Entries:
        """Return the entries of the steps after `first` up to `last`."""
        low, high = np.searchsorted(self.steps, [first, last], side="right")
        bounds = self.first[low : high + 1]
        part = slice(bounds[0], bounds[-1])
        steps, checksums = self.steps[low:high], self.checksums[low:high]
        return Entries(self.header, steps, checksums, bounds - bounds[0], self.begins[part], self.ends[part])


@dataclass(frozen=True)
class Start:
    """A start of a run."""

    header: StartHeader  # header of the lowest rank that has one
    entries: Mapping[int, Entries]  # of each rank that has a header

    @property
    def missing(self) -> list[int]:
        """Ranks without a header."""
        return [rank for rank in range(self.header.size) if rank not in self.entries]

    @property
    def tip(self) -> int:
        """The last step that any rank has recorded."""
        return max([self.header.from_step, *(int(e.steps[-1]) for e in self.entries.values() if len(e.steps))])

    @property
    def complete(self) -> int:
        """The last step that all ranks have recorded."""
        if self.missing:
            return self.header.from_step
        return min([int(e.steps[-1]) if len(e.steps) else self.header.from_step for e in self.entries.values()])


@dataclass(frozen=True)
class Window:
    """The steps of a start that count: after `first`, up to `last`, which every rank must have recorded."""

    start: Start
    first: int
    last: int

    def entries(self, rank: int) -> Entries:
        """Return the entries of a rank, which has a header, in the window."""
        return self.start.entries[rank].between(self.first, self.last)


def read_starts(folder: Path) -> tuple[list[Start], dict[str, int]]:
    """Return the starts in a ledger, in order, and the number of invalid lines by file: a kill may cut off one.

    Errors: RunDirectoryError: a file cannot be read, or has an unknown version.
    """
    headers: dict[tuple[int, int], StartHeader] = {}
    columns: dict[tuple[int, int], list[_Columns]] = {}
    unreadable: dict[str, int] = {}
    for path in ledger_files(folder):
        try:
            with path.open("rb") as file:
                while block := list(islice(file, _LINES_AT_ONCE)):
                    rows = [line for line in block if line[:1] not in b"{\n"]
                    found = [_header(path, line) for line in block if line[:1] == b"{"]
                    headers |= {(head.start, head.rank): head for head in found if head is not None}
                    lost = found.count(None) + _read_rows(rows, columns)
                    unreadable[path.name] = unreadable.get(path.name, 0) + lost
        except OSError as error:
            raise RunDirectoryError(f"cannot read {path}: {error.strerror}") from error
    starts: dict[int, dict[int, Entries]] = {}
    for (start, rank), header in sorted(headers.items(), key=lambda item: item[0]):
        parts = columns.pop((start, rank), [_arrays([])])
        starts.setdefault(start, {})[rank] = _entries(header, parts)
    return [Start(ranks[min(ranks)].header, ranks) for ranks in starts.values()], unreadable


def find_windows(starts: Sequence[Start], durable: int) -> list[Window]:
    """Return the steps that count, in order. For step t this is the newest start that began before t.

    `durable` is the step of the newest checkpoint, which every rank must have recorded; 0 if there is none.
    """
    found: list[Window] = []
    upper: int | None = None
    for start in reversed(starts):
        first = start.header.from_step
        last = max(start.complete, durable) if upper is None else upper
        if upper is None or first < upper:
            found.append(Window(start, first, last))
            upper = first
    return found[::-1]


def find_disagreement(start: Start) -> str | None:
    """Return an error if the ranks have recorded different headers of a start."""
    for rank, entries in start.entries.items():
        header = entries.header
        if replace(header, rank=0, host="") != replace(start.header, rank=0, host=""):
            return f"the ranks have recorded different headers of start {header.start}: rank {rank} has {header}"
    return None


def _header(path: Path, line: bytes) -> StartHeader | None:
    try:
        values = orjson.loads(line)
        version = values.pop("version")
    except (ValueError, AttributeError, KeyError):
        return None
    if version != VERSION:
        what, next_step = f"{path} has an unknown version", "use the version of hvdtrain that wrote it"
        raise RunDirectoryError(what, expected=f"version {VERSION}", found=str(version), next_step=next_step)
    try:
        return StartHeader(**values)
    except TypeError:
        return None


def _entries(header: StartHeader, parts: Sequence[_Columns]) -> Entries:
    steps, checksums, counts, begins, ends = (np.concatenate(column) for column in zip(*parts, strict=True))
    first = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    return Entries(header, steps, checksums, first, begins, ends)


def _read_rows(block: list[bytes], columns: dict[tuple[int, int], list[_Columns]]) -> int:
    """Add the lines of a block to the columns of each start and rank; return the number of invalid ones."""
    rows: list[_Line] = []
    try:
        rows = _decode_lines(b"[%b]" % b",".join(block))
    except ValueError:
        for line in block:
            with suppress(ValueError):
                rows += _decode_lines(b"[%b]" % line)
    of: dict[tuple[int, int], list[_Line]] = {}
    for row in rows:
        of.setdefault(row[:2], []).append(row)
    for key, own in of.items():
        columns.setdefault(key, []).append(_arrays(own))
    return len(block) - len(rows)


def _arrays(rows: Sequence[_Line]) -> _Columns:
    _, _, steps, ranges, checksums = zip(*rows, strict=True) if rows else ((), (), (), (), ())
    counts = np.array(list(map(len, ranges)), np.int64)
    bounds = np.array([bound for some in ranges for pair in some for bound in pair], np.int64).reshape(-1, 2)
    return [np.array(steps, np.int64), np.array(checksums, np.int64), counts, bounds[:, 0], bounds[:, 1]]
