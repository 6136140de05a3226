"""Formats of files with a document in each row: JSONL, CSV and Parquet.

pyarrow reads Parquet only: its reader of CSV knows neither the line of a row nor rows that are longer than a block.
"""

from __future__ import annotations

import codecs
import csv
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count
from typing import Any, BinaryIO, NamedTuple

import orjson

from hvdtrain.errors import DataError
from hvdtrain.files import is_url
from hvdtrain.task.base import import_library
from hvdtrain.task.source_files import EXTRA, SourceFile, opened

ROWS_FORMAT = 1  # version of the readers; tokens of others are made again

MISSING = object()

_LONGEST_BYTES = 1 << 28  # of a line; longer ones would need several times as much memory
_STEP_BYTES = 1 << 20


class Row(NamedTuple):
    """A row of a file: the values of its fields by name, unless it is `broken`, which says why."""

    values: Any
    place: str  # file and line
    broken: str = ""
    end: int = 0  # where reading can continue after it: bytes of lines, or a number of rows


def read_rows(file: SourceFile, fields: Collection[str], begin: int = 0) -> Iterator[Row]:
    """Yield the rows with these fields, such as ``meta.text``, or all fields. An unknown ending means JSONL.

    `begin`: 0, or the end of the row after which to continue.

    Errors: DataError: the file cannot be read.
    """
    if not file.size_bytes and not is_url(file.path):
        return
    read = FORMATS.get(file.endings[0], _json_lines)
    with opened(file, seeks=read is _parquet) as stream:
        yield from read(stream, file.path, fields, begin)


def value_of(row: Any, name: str) -> Any:
    """Return the value of a field, such as ``meta.text``, or MISSING."""
    if not isinstance(row, Mapping):
        return MISSING
    head, dot, rest = name.partition(".")
    return value_of(row.get(head), rest) if dot and name not in row else row.get(name, MISSING)


@dataclass
class Skipped:
    """Rows that are left out, if that is allowed: by reason their number, and the place of the first."""

    allowed: bool
    rows: dict[str, tuple[int, str]] = field(default_factory=dict)

    def add(self, reason: str, place: str, error: DataError) -> None:
        """Count a row. Errors: `error`, if it may not be left out."""
        if not self.allowed:
            raise error
        count, first = self.rows.get(reason, (0, place))
        self.rows[reason] = count + 1, first

    def note(self) -> str:
        """Return a clause about them, or an empty text."""
        found = [f"{count:,} {reason} (first: {place})" for reason, (count, place) in self.rows.items()]
        return f"; left out: {', '.join(found)}" if found else ""


def _lines(stream: BinaryIO, path: str, begin: int = 0) -> Iterator[Row]:
    """Yield each line as bytes; one that is too long is broken."""
    number, end = 0, begin
    after = f" after byte {begin:,}" if begin else ""
    try:
        if begin:
            stream.seek(begin)
    except (OSError, ValueError):  # it can only be read
        while begin > 0 and (skipped := stream.read(min(begin, _STEP_BYTES))):
            begin -= len(skipped)
    while line := stream.readline(_LONGEST_BYTES + 1):
        number, end = number + 1, end + len(line)
        is_long = len(line) > _LONGEST_BYTES
        while is_long and line and not line.endswith(b"\n"):
            line = stream.readline(_STEP_BYTES)
            end += len(line)
        broken = f"a line of more than {_LONGEST_BYTES:,} bytes" if is_long else ""
        text = line.removeprefix(codecs.BOM_UTF8 if end == len(line) else b"")
        yield Row(text, f"{path}, line {number}{after}", broken, end)


def _json_lines(stream: BinaryIO, path: str, fields: Collection[str], begin: int) -> Iterator[Row]:
    for line in _lines(stream, path, begin):
        if line.broken:
            yield line
        elif line.values.strip():
            try:
                row = line._replace(values=orjson.loads(line.values))
            except orjson.JSONDecodeError as error:
                row = line._replace(broken=f"not JSON: {error}")
            yield row


def _csv(stream: BinaryIO, path: str, fields: Collection[str], begin: int) -> Iterator[Row]:
    """Rows before `begin` are parsed, too: they may have line ends in quotes."""
    wrong: list[str] = []  # lines of the current row that are no text

    def texts() -> Iterator[str]:
        for line in _lines(stream, path):
            if line.broken:  # where the next row begins is unknown
                raise DataError(f"{line.place} cannot be read", found=line.broken, next_step="correct its quotes")
            try:
                yield line.values.decode("utf-8")
            except UnicodeDecodeError:
                wrong.append(line.place)
                yield line.values.decode("utf-8", "replace")

    csv.field_size_limit(_LONGEST_BYTES)
    reader = csv.reader(texts(), strict=True)
    names = next(reader, [])
    _check_names(names, path, fields)
    for number in count(1):
        begun = reader.line_num
        place = f"{path}, line {begun + 1}"
        wrong.clear()
        try:
            values = next(reader)
            broken = "not UTF-8" if wrong else ""
            if len(values) != len(names):
                broken = broken or f"{len(values)} fields, but {len(names)} names in the first line"
        except StopIteration:
            return
        except csv.Error as error:
            if "end of data" in str(error) and reader.line_num > begun + 1:  # it has taken many rows for one
                what = "a quote that nothing closes until the end of the file"
                raise DataError(f"{place} cannot be read", found=what, next_step="correct its quotes") from None
            values, broken = [""], f"not CSV: {error}"
        if values and number > begin:
            yield Row(None if broken else dict(zip(names, values, strict=True)), place, broken, number)


def _parquet(stream: BinaryIO, path: str, fields: Collection[str], begin: int) -> Iterator[Row]:
    parquet = import_library("pyarrow.parquet", "a file of Parquet", EXTRA)
    file = parquet.ParquetFile(stream, buffer_size=1 << 20, pre_buffer=False)  # in memory is a page, not a row group
    names = file.schema_arrow.names
    _check_names(names, path, fields)
    leaves = [f"{file.schema.column(place).path}." for place in range(len(file.schema))]
    stored = [
        name if any(leaf.startswith(f"{name}.") for leaf in leaves) else name.partition(".")[0] for name in fields
    ]
    columns = [name for name in stored if name in names or name.partition(".")[0] in names]
    ends = [*accumulate(file.metadata.row_group(group).num_rows for group in range(file.num_row_groups))]
    first = bisect_right(ends, begin)
    number, groups = ends[first - 1] if first else 0, range(first, len(ends))
    for batch in file.iter_batches(100, row_groups=groups, columns=columns or None, use_threads=False):
        skipped = min(max(begin - number, 0), len(batch))
        number += skipped
        for values in batch.slice(skipped).to_pylist():
            number += 1
            yield Row(values, f"{path}, row {number}", end=number)


def _check_names(names: Sequence[str], path: str, fields: Collection[str]) -> None:
    """Check that no field occurs twice. Errors: DataError."""
    wanted = {name.partition(".")[0] for name in fields} | set(fields) or set(names) - {""}
    if twice := sorted(name for name in wanted if names.count(name) > 1):
        raise DataError(
            f"{path} has more than one field {twice[0]!r}",
            expected="different names of fields",
            found=", ".join(names),
            next_step="rename one of them, or choose another field with --data.field",
        )


FORMATS: Mapping[str, Callable[[BinaryIO, str, Collection[str], int], Iterator[Row]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".csv": _csv,
    ".parquet": _parquet,
}
"""Readers by the ending of a file's name, before that of a compression.

They get a stream, its name, the fields that are needed (all, if empty), and the end of the row to continue after.
"""
