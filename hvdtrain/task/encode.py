"""From the bytes of documents to token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hvdtrain.errors import DataError, TaskError
from hvdtrain.regular import read_regular

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ids = NDArray[np.integer[Any]]

SEPARATOR = 256
"""Stands after each document where tokens are bytes."""

END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>", "[SEP]")
"""What a tokenizer's vocabulary may call the end of a document; the first that it has is used."""


class Encoder(Protocol):
    """Makes token ids of documents."""

    def identity(self) -> str:
        """Changes whenever the same text may get other ids."""
        ...

    def vocabulary(self) -> int:
        """One more than the largest id that may come."""
        ...

    def encode(self, pieces: Iterable[bytes], name: str) -> Iterator[Ids]:
        """The ids of one document, then the end of a document. `name` is for messages."""
        ...


class ByteEncoder:
    """Every byte is a token."""

    def identity(self) -> str:
        """Always the same."""
        return "bytes"

    def vocabulary(self) -> int:
        """The bytes and the separator."""
        return SEPARATOR + 1

    def encode(self, pieces: Iterable[bytes], name: str) -> Iterator[Ids]:
        """The bytes as they are, then the separator."""
        import numpy as np

        for piece in pieces:
            yield np.frombuffer(piece, np.uint8)
        yield np.array([SEPARATOR], np.uint16)


class TokenizerEncoder:
    """A tokenizer.json of the tokenizers library, read when first needed.

    A document is encoded in pieces that end at line ends, so that its size does not matter. Special tokens are
    not added, but for the end of a document where the vocabulary has one.

    Errors:
        DataError: the file cannot be read, or is no tokenizer.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._tokenizer: Any = None

    def identity(self) -> str:
        """A hash of the file's content."""
        return hashlib.sha256(self._content()).hexdigest()

    def vocabulary(self) -> int:
        """One more than the largest id of the vocabulary, added tokens included."""
        return int(max(self._load().get_vocab(with_added_tokens=True).values(), default=-1)) + 1

    def encode(self, pieces: Iterable[bytes], name: str) -> Iterator[Ids]:
        """The ids of UTF-8 text; DataError where it is none."""
        import numpy as np

        tokenizer = self._load()
        for text in _whole_lines(pieces, name):
            yield np.asarray(tokenizer.encode(text, add_special_tokens=False).ids, np.int64)
        end = next((i for i in map(tokenizer.token_to_id, END_TOKENS) if i is not None), None)
        if end is not None:
            yield np.array([end], np.int64)

    def _load(self) -> Any:
        if self._tokenizer is None:
            try:
                from tokenizers import Tokenizer
            except ModuleNotFoundError as error:
                raise TaskError(
                    "a tokenizer.json needs the tokenizers library", next_step='pip install "hvdtrain[lm]"'
                ) from error
            try:
                self._tokenizer = Tokenizer.from_buffer(self._content())
            except Exception as error:  # the library raises bare Exceptions and ValueErrors
                raise DataError(
                    f"{self.path} is not a tokenizer",
                    expected="a tokenizer.json as the tokenizers library saves it",
                    found=str(error),
                ) from error
        return self._tokenizer

    def _content(self) -> bytes:
        try:
            return read_regular(self.path)
        except OSError as error:
            raise DataError(
                f"the tokenizer {self.path} cannot be read",
                expected="a tokenizer.json of the tokenizers library",
                found=error.strerror,
                next_step="mend --data.tokenizer",
            ) from error


def _whole_lines(pieces: Iterable[bytes], name: str) -> Iterator[str]:
    """Cut anew at line ends, which stand inside of no UTF-8 sequence, and decode."""
    rest, done_bytes = b"", 0
    for piece in pieces:
        head, newline, tail = piece.rpartition(b"\n")
        if newline:
            yield _decode(rest + head + newline, done_bytes, name)
            done_bytes += len(rest) + len(head) + 1
            rest = tail
        else:
            rest += piece
    if rest:
        yield _decode(rest, done_bytes, name)


def _decode(content: bytes, at_bytes: int, name: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{name} is not text in UTF-8",
            expected="UTF-8, since a tokenizer reads text",
            found=f"byte 0x{content[error.start]:02x} at {at_bytes + error.start}",
            next_step="convert or leave out the file, or leave --data.tokenizer away to train on bytes",
        ) from error
