"""Read the files of a ledger as columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from hvdtrain.errors import RunDirectoryError
from hvdtrain.state.ledger import VERSION, StartHeader

_LINES_AT_ONCE = 1 << 16
"""Lines to parse in one call, which is several times as fast as one call per line."""


@dataclass(frozen=True)
class Entries:
    """A rank's steps of one start, in the order of the file.

    Attributes:
        steps: [N].
        checksums: checksums of the used indices [N].
        first: [N + 1]; step i has the ranges first[i] to first[i + 1].
        begins: begins of the ranges [M].
        ends: ends of the ranges [M].
        unreadable: number of invalid lines; a kill may cut off the last one.
    """

    steps: NDArray[np.int64]
    checksums: NDArray[np.int64]
    first: NDArray[np.int64]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    unreadable: int = 0

    def rows(self, low: int, high: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return step, begin and end of each range in the entries `low` to `high`."""
        counts = np.diff(self.first[low : high + 1])
        part = slice(int(self.first[low]), int(self.first[high]))
        return np.repeat(self.steps[low:high], counts), self.begins[part], self.ends[part]


def read_file(path: Path) -> tuple[StartHeader, Entries] | None:
    """Read a file of a ledger. Return None if its first line is cut off, because its rank was killed early.

    Errors:
        RunDirectoryError: it cannot be read, or has an unknown version.
    """
    try:
        with path.open("rb") as file:
            header = _header(path, file.readline())
            return None if header is None else (header, _entries(file))
    except OSError as error:
        raise RunDirectoryError(f"cannot read {path}: {error.strerror}") from error


def _header(path: Path, line: bytes) -> StartHeader | None:
    try:
        values = orjson.loads(line)
        version = values.pop("version")
    except (ValueError, AttributeError, KeyError):
        return None
    if version != VERSION:
        raise RunDirectoryError(
            f"{path} has an unknown version",
            expected=f"version {VERSION}",
            found=str(version),
            next_step="use the version of hvdtrain that wrote it",
        )
    try:
        return StartHeader(**values)
    except TypeError:
        return None


def _entries(lines: Iterator[bytes]) -> Entries:
    parts: list[list[NDArray[np.int64]]] = []
    unreadable = 0
    block: list[bytes] = []
    for line in lines:
        block.append(line)
        if len(block) == _LINES_AT_ONCE:
            columns, lost = _columns(block)
            parts.append(columns)
            unreadable += lost
            block = []
    columns, lost = _columns(block)
    parts.append(columns)
    steps, checksums, counts, begins, ends = (np.concatenate(column) for column in zip(*parts, strict=True))
    first = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    return Entries(steps, checksums, first, begins, ends, unreadable + lost)


def _columns(block: list[bytes]) -> tuple[list[NDArray[np.int64]], int]:
    """Return steps, checksums, numbers of ranges, begins and ends; and the number of invalid lines."""
    text = b",".join(block)
    try:
        if _all_of_one_range(text, len(block)):
            numbers = orjson.loads(text.translate(None, b"[]").join((b"[", b"]")))
            steps, begins, ends, checksums = np.array(numbers, np.int64).reshape(-1, 4).T
            return [steps, checksums, np.ones(len(steps), np.int64), begins, ends], 0
        return _arrays(orjson.loads(text.join((b"[", b"]")))), 0
    except (ValueError, TypeError, OverflowError):
        pass
    good: list[Any] = []
    for line in block:
        try:
            row = orjson.loads(line)
            _arrays([row])
        except (ValueError, TypeError, OverflowError):
            continue
        good.append(row)
    return _arrays(good), len(block) - len(good)


def _all_of_one_range(text: bytes, lines: int) -> bool:
    """Return whether each line has one range, as is usual. Without brackets that is four numbers, faster to parse."""
    marks = ((b"[", 3), (b",[[", 1), (b"]],", 1), (b"]", 3))
    return text.count(b",") == 4 * lines - 1 and all(text.count(mark) == each * lines for mark, each in marks)


def _arrays(rows: Sequence[Any]) -> list[NDArray[np.int64]]:
    steps, ranges, checksums = zip(*rows, strict=True) if rows else ((), (), ())
    counts = np.array(list(map(len, ranges)), np.int64)
    flat = [bound for some in ranges for pair in some for bound in pair]
    bounds = np.array(flat, np.int64).reshape(-1, 2)
    if len(bounds) != counts.sum():
        raise ValueError("a range has two numbers")
    columns = [np.array(steps, np.int64), np.array(checksums, np.int64), counts, bounds[:, 0], bounds[:, 1]]
    if any(column.ndim != 1 for column in columns):
        raise ValueError("not a line of a ledger")
    return columns
