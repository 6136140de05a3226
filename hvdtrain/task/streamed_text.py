"""Text that is tokenized while training reads it: training begins at once, and the disk holds a short stretch of it.

The text is an endless stream of documents, pass after pass, with the files of each pass in another order. The sizes of
documents cut it into units. Whichever process of a host needs a unit first tokenizes it, for all of them. Samples are
windows of the tokens, shuffled within blocks. So what a position holds depends on the options only, not on the number
of ranks, and reading continues at any block from the place of its first unit.

datasets, MosaicML Streaming and litdata divide the files among ranks: the order then depends on their number.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hvdtrain.data.order import mix_seed, sample_indices
from hvdtrain.errors import DataError
from hvdtrain.task.encode import Document, Encoder, Ids
from hvdtrain.task.once_per_host import once_per_host
from hvdtrain.task.source_files import SourceFile, check_unchanged
from hvdtrain.task.text_sources import Documents
from hvdtrain.task.token_file import TokenFile, write_tokens

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

UNIT_BYTES = 1 << 20  # of text, unless the last document has more
LARGEST = 1 << 26  # bytes of a plain file, which is one document
_SHUFFLED_TOKENS = 1 << 20
"""Tokens of a block, which a resume tokenizes first. The next block is tokenized ahead of what is read."""


class _Place(NamedTuple):
    """The first document of a unit: tokens before it, pass, number of its file in that pass, and where in the file."""

    tokens: int = 0
    epoch: int = 0
    file: int = 0
    begin: int = 0


class _Unit(NamedTuple):
    place: _Place
    next: _Place
    folder: Path
    ids: Ids  # mapped: a removed file can still be read


@dataclass(frozen=True)
class StreamedText:
    """Files as samples of seq_len + 1 ids. `key`: a hash of what changes them; `digest`: one that hosts share."""

    documents: Documents
    encoder: Encoder
    seq_len: int
    key: str
    digest: str

    def files(self, seed: int, epoch: int) -> list[SourceFile]:
        """Return the files in the order of a pass."""
        files = self.documents.files
        order = sample_indices(np.arange(len(files)) + epoch * len(files), len(files), mix_seed(seed, 0))
        return [files[number] for number in order.tolist()]

    def documents_from(self, seed: int, place: _Place) -> Iterator[tuple[Document, _Place]]:
        """Yield documents from a place on, each with the place after it, but for the number of tokens."""
        _, _, first, begin = place
        for epoch in count(place.epoch):
            files, read = self.files(seed, epoch), first + begin
            skipped = replace(self.documents.skipped, rows={}) if epoch else self.documents.skipped  # counts each once
            for number in range(first, len(files)):
                check_unchanged(files[number])
                for document, end in self.documents.read(files[number], skipped, begin):
                    read += 1
                    yield document, _Place(0, epoch, number, end)
                begin = 0
            if not read:
                raise DataError("the text is empty", expected="text to train on", found="files without a document")
            first = 0

    def by_position(self, seed: int, state: dict[str, Any], span: int) -> StreamedWindows:
        """Return the samples by position from a `state`, read, on; ranks are at most `span` samples apart."""
        return StreamedWindows(self, seed, state, span)


class StreamedWindows:
    """The samples of a stream by position: positions of a block of samples are cheap, in any order.

    Errors: DataError: when it is read: a file cannot be read, or there is no text.
    """

    def __init__(self, text: StreamedText, seed: int, state: dict[str, Any], span: int) -> None:
        self._text, self._seed, self._of = text, seed, [text.digest, seed, text.seq_len]
        self._count = max(1, _SHUFFLED_TOKENS // text.seq_len)  # samples of a block
        self._ahead = 1 + span // self._count  # blocks
        self._start = _Place(*state.get("place", ()))
        if state and state.get("of") != self._of:  # this text begins there
            self._start = _Place(state.get("sample", 0) // self._count * self._count * text.seq_len)
        self._noted = 0, self._start
        self._block = -1
        self._order: Any = None
        self._units: list[_Unit] = []  # from the block before on; the reader appends
        self._old: deque[tuple[int, Path]] = deque()  # units by the block at which they were not needed any more
        self._documents: Iterator[tuple[Document, _Place]] = iter(())
        self._at: _Place | None = None  # where these documents are
        self._next_warning = 1  # number of rows left out from which on to warn again
        self._reader: Any = None  # an executor with one thread, which alone reads documents

    def __getitem__(self, position: int) -> Tensor:
        """Return the ids of a sample: (seq_len + 1,), int64."""
        import torch

        block, offset = divmod(position, self._count)
        if block != self._block:
            self._enter(block)
        begin = (block * self._count + int(self._order[offset])) * self._text.seq_len
        return torch.from_numpy(self._ids(begin, begin + self._text.seq_len + 1))

    def note_place(self) -> None:
        """Note a place from which the block that was read last, and all later ones, can be read."""
        first = self._block * self._count
        places = [unit.place for unit in self._units if unit.place.tokens <= first * self._text.seq_len]
        self._noted = (first, places[-1]) if places else (self._noted[0], self._start)

    def state(self) -> bytes:
        """Return the noted place as JSON."""
        return json.dumps({"of": self._of, "sample": self._noted[0], "place": self._noted[1]}).encode()

    def _ids(self, begin: int, end: int) -> Ids:
        number = bisect_right(self._units, begin, key=lambda unit: unit.place.tokens) - 1
        parts: list[Ids] = []
        while begin < end:
            unit = self._units[number]
            parts.append(unit.ids[begin - unit.place.tokens : end - unit.place.tokens].astype(np.int64))
            begin, number = unit.next.tokens, number + 1
        return np.concatenate(parts)

    def _enter(self, block: int) -> None:
        """Let the units of a block be there, and begin with those of the next one."""
        if self._reader is None:
            self._reader = ThreadPoolExecutor(1, "text")
        size = self._count * self._text.seq_len
        self._reader.submit(self._read, block * size, (block + 1) * size + 1).result()
        while self._units[0].next.tokens <= (block - 1) * size:
            self._old.append((block, self._units.pop(0).folder))
        while self._old and self._old[0][0] <= block - self._ahead:
            folder = self._old.popleft()[1]
            shutil.rmtree(folder, ignore_errors=True)
            folder.with_name(f"{folder.name}.lock").unlink(missing_ok=True)
        positions = np.arange(block * self._count, (block + 1) * self._count)
        self._block, self._order = block, sample_indices(positions, self._count, self._seed)
        self._reader.submit(self._read_ahead, (block + 1 + self._ahead) * size + 1)

    def _read(self, begin: int, end: int) -> None:
        if self._units and self._units[0].place.tokens > begin:
            self._units = []  # they are those of later positions
        place = self._start if self._start.tokens <= begin else _Place()
        while (place := self._units[-1].next if self._units else place).tokens < end:
            self._units.append(self._unit(place))

    def _read_ahead(self, end: int) -> None:
        """Read a unit, then the next: the interpreter can end between them. An error occurs again when it matters."""
        if (place := self._units[-1].next).tokens < end:
            self._units.append(self._unit(place))
            with suppress(RuntimeError):  # it ends
                self._reader.submit(self._read_ahead, end)

    def _unit(self, place: _Place) -> _Unit:
        key = hashlib.sha256(repr([self._text.key, self._seed, UNIT_BYTES, *place]).encode()).hexdigest()[:24]
        folder = once_per_host("streamed", key, lambda it: self._write(it, place), lambda it: bool(TokenFile.load(it)))
        if file := TokenFile.load(folder):
            with suppress(FileNotFoundError):
                return _Unit(place, _Place(place.tokens + file.train, *json.loads(file.note)), folder, file.map())
        return self._unit(place)  # a rank that is far ahead has just removed it

    def _write(self, folder: Path, place: _Place) -> None:
        if self._at != place:
            self._documents = self._text.documents_from(self._seed, place)
        self._at, end, size_bytes = None, place, 0

        def pieces(document: Document) -> Iterator[bytes]:
            nonlocal size_bytes
            size_bytes += 1  # its end
            for piece in document.pieces:
                size_bytes += len(piece)
                yield piece

        def documents() -> Iterator[Document]:
            nonlocal end
            while size_bytes < UNIT_BYTES:
                document, end = next(self._documents)
                yield Document(pieces(document), document.name)

        encoder = self._text.encoder
        about: Any = {"tail": 0.0, "vocabulary": encoder.vocabulary(), "note": lambda: json.dumps(end[1:])}
        file = write_tokens(folder, encoder.encode(documents()), None, **about)
        if not file.train:
            raise DataError("the text is empty", expected="tokens", found=f"none in {size_bytes:,} bytes of documents")
        self._at = end._replace(tokens=place.tokens + file.train)
        skipped = self._text.documents.skipped
        if (found := sum(number for number, _ in skipped.rows.values())) >= self._next_warning:
            log.warning("the text so far%s", skipped.note())
            self._next_warning = 2 * found
