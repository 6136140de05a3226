"""Encode the bytes of documents as token ids; the files of a tokenizer, as transformers has them next to a model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvdtrain.errors import DataError
from hvdtrain.files import read_regular
from hvdtrain.task.base import import_library

TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
TOKENIZER_FILES = (TOKENIZER, SETTINGS, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")

SEPARATOR = 256  # id after each document if tokens are bytes

END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>", "[SEP]")
"""Names of the token at the end of a document. The first one in a vocabulary is used."""

_BATCH_CHARACTERS = 1 << 23
_BATCH_TEXTS = 1 << 14


def settings(end: str | None, **more: Any) -> bytes:
    """Return a tokenizer_config.json for a tokenizer without one. `end`: its token after each document, if any."""
    named = {} if end is None else {"eos_token": end, "pad_token": end}
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **named, **more}
    return json.dumps(content, indent=1).encode()


def byte_tokenizer(end: str) -> bytes:
    """Return a tokenizer.json in which each byte of UTF-8 is the token of its value, and `end` is token 256.

    It decodes bytes that are not UTF-8 to U+FFFD, as Python does.
    """
    tokenizers = import_library("tokenizers", "a tokenizer.json", "lm")
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=_byte_vocabulary(), merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([tokenizers.AddedToken(end, special=True, normalized=False)])
    return str(made.to_str()).encode()


def is_byte_tokenizer(tokenizer: Path) -> bool:
    """Return whether a tokenizer.json is that of `byte_tokenizer`. Errors: OSError."""
    try:
        model: Any = json.loads(read_regular(tokenizer))["model"]
        return bool(model["vocab"] == _byte_vocabulary() and not model["merges"])
    except (ValueError, KeyError, TypeError):
        return False


def _byte_vocabulary() -> Mapping[str, int]:
    """Return each byte by the character that the pre-tokenizer ByteLevel writes for it."""
    found = import_library("transformers.convert_slow_tokenizer", "a tokenizer.json", "lm").bytes_to_unicode()
    return {character: byte for byte, character in found.items()}


Ids = NDArray[np.integer[Any]]


class Document(NamedTuple):
    """The bytes of a document in pieces, and its name for errors."""

    pieces: Iterable[bytes]
    name: str


class ByteEncoder:
    """Every byte is a token."""

    def identity(self) -> str:
        """Return a constant."""
        return "bytes"

    def vocabulary(self) -> int:
        """Return the number of byte values and the separator."""
        return SEPARATOR + 1

    def skip_pieces(self, pieces: int) -> None:
        """Do nothing: bytes cost nothing."""

    def encode(self, documents: Iterable[Document]) -> Iterator[Ids]:
        """Yield the bytes of each document, then the separator."""
        for document in documents:
            for piece in document.pieces:
                yield np.frombuffer(piece, np.uint8)
            yield np.array([SEPARATOR], np.uint16)

    def end_id(self) -> int:
        """Return the separator."""
        return SEPARATOR

    def files(self) -> dict[str, bytes]:
        """Return the files of a tokenizer for transformers with the same ids, by name."""
        end = END_TOKENS[0]
        # Its name in a text is text, as in `encode`.
        return {TOKENIZER: byte_tokenizer(end), SETTINGS: settings(end, split_special_tokens=True)}


class TokenizerEncoder:
    """A tokenizer.json of the tokenizers library, read on first use.

    It encodes large documents in pieces that end at line ends, so they need little memory, and several pieces at once
    on all CPU cores, while the caller uses the pieces before. The only special token that it adds is the end of a
    document, if the vocabulary has one.

    Errors: DataError: the file cannot be read, or is no tokenizer.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._skip = 0

    def identity(self) -> str:
        """Return a hash of the file's content, and how documents are cut: 2 is less often than 1."""
        return f"{hashlib.sha256(self._content()).hexdigest()}-2"

    def vocabulary(self) -> int:
        """Return one more than the largest id of the vocabulary, added tokens included."""
        return int(max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)) + 1

    def skip_pieces(self, pieces: int) -> None:
        """Let the next pieces be empty."""
        self._skip = pieces

    def encode(self, documents: Iterable[Document]) -> Iterator[Ids]:
        """Yield the ids of UTF-8 text, in order. Errors: DataError: it is not UTF-8."""
        _ = self._tokenizer  # an error of the file comes first, and in this thread
        with ThreadPoolExecutor(1, "tokenizer") as thread:  # the library holds no lock of Python's while it encodes
            before: Future[list[Ids]] | None = None
            for batch in self._batches(documents):
                current = thread.submit(self._encode_batch, batch)
                if before is not None:
                    yield from before.result()
                before = current
            if before is not None:
                yield from before.result()

    def _batches(self, documents: Iterable[Document]) -> Iterator[list[str | None]]:
        """Yield texts in batches; None is the end of a document, and an empty text is not to be encoded."""
        batch: list[str | None] = []
        characters = 0
        has_end = self.end_id() is not None
        for document in documents:
            for text in chain(_whole_lines(document.pieces, document.name), [None] if has_end else []):
                skips = self._skip > 0
                self._skip -= skips
                batch.append("" if skips else text)
                characters += len(batch[-1] or "")
                if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_TEXTS:
                    yield batch
                    batch, characters = [], 0
        yield batch

    def _encode_batch(self, batch: list[str | None]) -> list[Ids]:
        """Return the ids of each text or end of a document. The library has threads for a batch."""
        end = np.array([self.end_id() or 0], np.int64)
        texts = [text for text in batch if text is not None]
        encoded = iter(self._tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        return [end if text is None else np.asarray(next(encoded).ids, np.int64) for text in batch]

    def end_id(self) -> int | None:
        """Return the id after each document; None if the vocabulary has none of `END_TOKENS`."""
        end = self._end()
        return None if end is None else int(self._tokenizer.token_to_id(end))

    def files(self) -> dict[str, bytes]:
        """Return the files of the tokenizer for transformers, by name."""
        places = {TOKENIZER: self.path, **{name: self.path.with_name(name) for name in TOKENIZER_FILES[1:]}}
        files = {name: read_regular(file) for name, file in places.items() if name == TOKENIZER or file.is_file()}
        return files if SETTINGS in files else {**files, SETTINGS: settings(self._end())}

    def _end(self) -> str | None:
        return next((name for name in END_TOKENS if self._tokenizer.token_to_id(name) is not None), None)

    @cached_property
    def _tokenizer(self) -> Any:
        tokenizers = import_library("tokenizers", "a tokenizer.json", "lm")
        try:
            return tokenizers.Tokenizer.from_buffer(self._content())
        except Exception as error:  # the library raises bare Exceptions and ValueErrors
            raise DataError(
                f"{self.path} is not a tokenizer",
                expected="a tokenizer.json saved by the tokenizers library",
                found=str(error),
            ) from error

    def _content(self) -> bytes:
        try:
            return read_regular(self.path)
        except OSError as error:
            raise DataError(
                f"cannot read the tokenizer {self.path}",
                expected="a tokenizer.json of the tokenizers library",
                found=error.strerror,
                next_step="correct --data.tokenizer",
            ) from error


Encoder = ByteEncoder | TokenizerEncoder
"""Encodes documents. Its `identity` changes whenever the same document may get other ids."""


def _whole_lines(pieces: Iterable[bytes], name: str) -> Iterator[str]:
    """Join pieces, but cut at line ends, which no UTF-8 sequence contains, and decode. A single piece is not cut."""
    rest, done_bytes = b"", 0
    for piece in pieces:
        head, newline, tail = rest.rpartition(b"\n")
        if newline:
            yield _decode(head + newline, done_bytes, name)
            done_bytes += len(head) + 1
        rest = tail + piece if newline else rest + piece
    if rest:
        yield _decode(rest, done_bytes, name)


def _decode(content: bytes, at_bytes: int, name: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{name} is not text in UTF-8",
            expected="UTF-8, because a tokenizer reads text",
            found=f"byte 0x{content[error.start]:02x} at {at_bytes + error.start}",
            next_step="convert or exclude the file, or omit --data.tokenizer to train on bytes",
        ) from error
