"""The documents of a corpus: source files of the standard library, or the user's files, whole or row by row."""

from __future__ import annotations

import codecs
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from hvdtrain.errors import DataError, listed
from hvdtrain.task.encode import Document, Encoder, Ids
from hvdtrain.task.formats import FORMATS, MISSING, ROWS_FORMAT, Row, Skipped, read_rows, value_of
from hvdtrain.task.source_files import ReadBytes, SourceFile, local_files, opened

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_PIECE_BYTES = 1 << 20
_FIELDS = ("text", "content")  # names of the field with the text; the first one in a row is used
_MARKS = {  # longer ones first, because one begins with a shorter one
    **dict.fromkeys((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE), ("UTF-32", "iconv -f UTF-32 -t UTF-8")),
    **dict.fromkeys((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE), ("UTF-16", "iconv -f UTF-16 -t UTF-8")),
    b"\x1f\x8b": ("gzip", "gunzip '{path}'; or end its name in .gz"),
    b"\x28\xb5\x2f\xfd": ("Zstandard", "unzstd '{path}'; or end its name in .zst"),
    b"\xfd7zXZ": ("xz", "unxz '{path}'"),
    b"PK\3\4": ("zip", "unzip '{path}'"),
    b"%PDF-": ("PDF", "pdftotext '{path}'"),
    b"PAR1": ("Parquet", "end its name in .parquet"),
}


@dataclass(frozen=True)
class Source:
    """Documents as ids."""

    name: str
    identity: list[Any]  # JSON values that change with the documents' content, order or split
    train: Callable[[], Iterator[Ids]]  # starts to yield the ids to train on, in pieces
    heldout: Callable[[], Iterator[Ids] | None]  # starts to yield them; None: hold out the end of `train`
    vocabulary: Callable[[], int]  # returns one more than the largest id; called when the ids are written
    tokenizer: Callable[[], Mapping[str, bytes]]  # its files for transformers, by name; empty if unknown
    end: Callable[[], int | None]  # returns the id after each document; None if there is none, or it is unknown
    paths: Sequence[str] = ()  # of the files or folders that are read
    note: Callable[[], str] = str  # returns a line about the ids after they have been written
    skip: Callable[[int], None] = lambda pieces: None  # lets the next pieces be empty: their ids are written already
    read: ReadBytes | None = None  # how far the files are read
    documents: Any = None  # of files: `Documents`
    encoder: Any = None  # of their text


def standard_library() -> list[SourceFile]:
    """List the source files of the interpreter's standard library without its tests, by name."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        files += [Path(place, name) for name in names if name.endswith(".py")]
    if not files:
        raise DataError(
            "this Python has no source files of its standard library to train on",
            expected=f"*.py in {folder}",
            next_step="use your own text: --data.text 'FILES'",
        )
    return local_files(files)


def text_source(
    files: list[SourceFile], encoder: Encoder, heldout: float, *, name: str | None = None, skips: bool = False
) -> Source:
    """Make a source that holds out whole files, by a hash of their name, or the end of a single file.

    With files of rows, it holds out whole documents, evenly spread. `name`: of the field with the text, if it is known.
    `skips`: rows without a text are left out, otherwise refused.
    """
    documents = Documents(files, name, heldout, Skipped(skips))
    rows = documents if has_rows(files) else None
    chosen = set() if rows else _choose_heldout(files, heldout)

    def part(*, held: bool) -> Iterator[Ids]:
        whole = (Document(_pieces(file), file.path) for file in files if (file in chosen) == held)
        return encoder.encode(rows.part(held=held) if rows else whole)

    identity = [ROWS_FORMAT, name, skips] if rows else []
    return Source(
        name=files[0].name if len(files) == 1 else f"{len(files)} files",
        identity=[encoder.identity(), *identity, *([*file.identity, file in chosen] for file in files)],
        train=lambda: part(held=False),
        heldout=lambda: part(held=True) if rows or not _has_single(files) else None,
        vocabulary=encoder.vocabulary,
        tokenizer=encoder.files,
        end=encoder.end_id,
        paths=[file.path for file in files],
        note=rows.note if rows else str,
        skip=encoder.skip_pieces,
        read=files[0].read,
        documents=documents,
        encoder=encoder,
    )


def is_held(number: int, share: float) -> bool:
    """Return whether a document is held out: `share` of them, evenly spread."""
    return int((number + 1) * share) > int(number * share)


def has_rows(files: Sequence[SourceFile]) -> bool:
    """Return whether a document of any of the files is a row."""
    return any(file.endings[0] in FORMATS for file in files)


@dataclass
class Documents:
    """The documents of files: whole files, and the texts of rows. `given`: the field, if it is not to be guessed."""

    files: list[SourceFile]
    given: str | None
    heldout: float
    skipped: Skipped
    count: int = field(default=0, init=False)

    def note(self) -> str:
        """Return what was read and what was left out, after all documents to train on have been read."""
        guessed = "" if self.given else " (guessed, see --data.field)"
        return f"{self.count:,} documents, by field {self.name!r}{guessed}{self.skipped.note()}"

    def part(self, *, held: bool) -> Iterator[Document]:
        """Yield the documents that are held out, or the others. The others count what is left out."""
        skipped = Skipped(self.skipped.allowed) if held else self.skipped
        count = 0
        for document in self._all(skipped) if self.heldout or not held else ():
            if is_held(count, self.heldout) == held:
                yield document
            count += 1
        self.count = max(self.count, count)

    def _all(self, skipped: Skipped) -> Iterator[Document]:
        return (document for file in self.files for document, _ in self.read(file, skipped))

    def read(self, file: SourceFile, skipped: Skipped, begin: int = 0) -> Iterator[tuple[Document, int]]:
        """Yield the documents of a file, each with its end: reading continues there, by `begin`.

        Errors: DataError: a document cannot be read, and may not be left out.
        """
        if not has_rows([file]):
            if not begin:
                yield Document(_pieces(file), file.path), 1
            return
        for row in read_rows(file, [self.name], begin):
            value = value_of(row.values, self.name)
            if isinstance(value, str):
                yield Document([value.encode()], row.place), row.end
            else:
                skipped.add(*self._wrong(row, value))

    def _wrong(self, row: Row, value: Any) -> tuple[str, str, DataError]:
        """Return why a row has no text: a kind of reason, the place and an error."""
        reason, found = "not text", f"a value of type {type(value).__name__}"
        if row.broken:
            reason, found = "broken", row.broken
        elif value is MISSING:
            fields = f"the fields {listed(row.values, most=8)}" if isinstance(row.values, Mapping) else "no fields"
            reason, found = "without the field", fields
        elif value is None:
            reason, found = "null", "null"
        next_step = (
            "correct the row, choose another field with --data.field, or leave such rows out: --data.on_error skip"
        )
        what, expected = f"{row.place} has no text to train on", f"a text in the field {self.name!r}"
        return reason, row.place, DataError(what, expected=expected, found=found, next_step=next_step)

    @cached_property
    def name(self) -> str:
        """The name of the field with the text: given, or guessed from the first row that is not broken."""
        if self.given:
            return self.given
        rows = (row for file in self.files if has_rows([file]) for row in read_rows(file, ()))
        first = next(rows, Row({}, self.files[0].path, "no row with fields"))
        row = next((row for row in chain([first], rows) if isinstance(row.values, Mapping)), first._replace(values={}))
        texts = [name for name, value in row.values.items() if isinstance(value, str)]
        known = [name for name in _FIELDS if name in row.values]
        if known or len(texts) == 1:
            return known[0] if known else texts[0]
        raise DataError(
            f"the field with the text is unknown in {row.place}",
            expected=f"the field {' or '.join(_FIELDS)}, or a single one with text",
            found=f"the fields {listed(row.values, most=8)}" if row.values else first.broken or "no row with fields",
            next_step="use --data.field NAME, or --data.chat for conversations",
        )


def _has_single(files: list[SourceFile]) -> bool:
    return sum(file.size_bytes > 0 for file in files) == 1


def _choose_heldout(files: list[SourceFile], share: float) -> set[SourceFile]:
    """Choose files by their hashed names: never all with text, and at least one with text if `share` is not 0."""
    if _has_single(files) or not share:
        return set()
    held = {file for file in files if _hash01(file.name) < share}
    if not any(file.size_bytes for file in held):  # few files: choose the one with the size nearest to the share
        filled = [file for file in files if file.size_bytes]
        wanted_bytes = share * sum(file.size_bytes for file in filled)
        held = {min(filled, key=lambda file: (abs(file.size_bytes - wanted_bytes), file.name))}
    if not sum(file.size_bytes for file in files if file not in held):
        held -= {max(files, key=lambda file: (file.size_bytes, file.name))}
    return held


def _hash01(name: str) -> float:
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:7], "big") / (1 << 56)


def _pieces(file: SourceFile) -> Iterator[bytes]:
    """Yield the content of a text file. Errors: DataError: it cannot be read, or is not text."""
    at_bytes = 0
    with opened(file) as stream:
        while piece := stream.read(_PIECE_BYTES):
            begins = () if at_bytes else [about for mark, about in _MARKS.items() if piece.startswith(mark)]
            if begins or b"\0" in piece:
                mark, convert = next(iter(begins), ("", "iconv -f UTF-16LE -t UTF-8"))
                raise DataError(
                    f"{file.path} is not text that can be trained on",
                    expected="UTF-8, or another encoding without zero bytes",
                    found=f"{mark}, according to its first bytes"
                    if mark
                    else f"a zero byte at {at_bytes + piece.index(0)}: a binary file, or UTF-16 without its mark",
                    next_step=f"convert it ({convert.format(path=file.path)}), or exclude it from {file.option}",
                )
            yield piece
            at_bytes += len(piece)
