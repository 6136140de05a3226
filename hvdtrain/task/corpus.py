"""Training data of a language model: its options, and the windows of tokens that they select."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hvdtrain.errors import ConfigError, DataError
from hvdtrain.task.chat import chat_source
from hvdtrain.task.dataset_source import dataset_source
from hvdtrain.task.encode import ByteEncoder, TokenizerEncoder
from hvdtrain.task.once_per_host import once_per_host
from hvdtrain.task.text_sources import Source, files_matching, hub_advice, standard_library, text_source
from hvdtrain.task.token_file import FORMAT, Rows, TokenFile, Windows, describe_npy, write_tokens
from hvdtrain.task.token_loss import COUNTED, MARKS

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from hvdtrain.task.encode import Encoder, Ids


_KINDS = ("text", "tokens", "dataset", "chat")

log = logging.getLogger(__name__)

_LOOKED_AT = 1 << 24  # tokens of a source to look for the end of a document in

_PROGRESS_S = 10.0  # seconds between reports while text is tokenized

_SAMPLES = 64  # samples of a source from which the typical number of tokens with a loss is computed


@dataclass(frozen=True)
class TextConfig:
    """Training data. The default is the source code of Python's standard library, as bytes.

    Attributes:
        text: train on text files: names or quoted patterns such as 'books/**/*.txt'. Some of the files are held out,
            or the end of the file if there is only one (default: source code of Python's standard library)
        tokens: train on token ids: .npy files with one dimension of integers. The end of each is held out (default: use
            data.text)
        dataset: train on folders written by datasets' save_to_disk, with a column text or input_ids. The validation or
            test split is held out, otherwise the end (default: use data.text)
        chat: train the assistant's turns of conversations: JSONL files with messages, or prompt and completion, by the
            tokenizer's chat template. Samples are whole conversations, and some of them are held out (default: use
            data.text)
        weights: fraction of samples from each name in the option of the data, as [0.7, 0.3]; smaller sources repeat
            (default: each sample once per epoch)
        tokenizer: tokenizer.json for the text (default: the tokenizer of model.from, otherwise each byte is a
            token)
        documents: what a token sees of its sample: joined, all tokens before it; separate, those of its own document
            or conversation, and positions restart with each (default: separate for data.chat, otherwise joined)
        end_token: id of the last token of each document, for data.documents separate (default: that of the tokenizer)
        seq_len: tokens per sample, and the weight of a sample in the loss
        heldout: fraction of the data to hold out for evaluation
    """

    text: list[str] | str | None = None
    tokens: list[str] | str | None = None
    dataset: list[str] | str | None = None
    chat: list[str] | str | None = None
    weights: list[float] | None = None
    tokenizer: str | None = None
    documents: Literal["joined", "separate"] | None = None
    end_token: int | None = None
    seq_len: int = 128
    heldout: float = 0.05

    @property
    def separate(self) -> bool:
        """Whether documents do not see each other."""
        return self.documents == "separate" or (self.documents is None and bool(self.chat))

    @property
    def names(self) -> list[str]:
        """The names of files or folders that are given; empty for the standard library."""
        given = self.text or self.tokens or self.dataset or self.chat or []
        return [given] if isinstance(given, str) else given


def check_data(config: TextConfig) -> None:
    """Check that options of the data have valid values, and do not conflict. Errors: ConfigError, DataError."""
    given = [name for name in _KINDS if getattr(config, name)]
    if len(given) > 1:
        raise ConfigError(
            "more than one kind of data is set",
            expected=f"one of {', '.join(f'data.{name}' for name in _KINDS)}, or none for the standard library",
            found=" and ".join(f"data.{name}" for name in given),
        )
    if config.tokens and config.tokenizer:
        raise ConfigError(
            "data.tokens and data.tokenizer conflict",
            expected="a tokenizer only for text; data.tokens contains ids",
            next_step="omit --data.tokenizer",
        )
    if config.end_token is not None and (config.chat or not config.separate):
        raise ConfigError(
            "data.end_token has no effect",
            expected="an end token only if documents, not conversations, are separate",
            next_step="add --data.documents separate, or omit --data.end_token",
        )
    if config.weights is not None:
        from hvdtrain.data.mixture import whole_weights

        whole_weights(config.weights, len(config.names) or 1)
    if config.seq_len < 1:
        raise ConfigError("invalid --data.seq_len", expected="1 or more", found=str(config.seq_len))
    if not 0 <= config.heldout < 1:
        raise ConfigError("invalid --data.heldout", expected="0 or more, and less than 1", found=str(config.heldout))


@dataclass(frozen=True)
class Corpus:
    """Samples of one source, or of several."""

    train: Any  # a map-style data set with at least one sample of each source
    heldout: Any  # of all sources in order; None if there are too few tokens for a sample
    vocabulary: int  # one more than the largest id
    nominal_weight: float  # number of tokens with a loss in a typical sample
    digest: str  # a hash of the data and the weights
    tokenizer: Mapping[str, bytes]  # its files for transformers, by name; empty if it is unknown
    end: int | None  # id of the last token of each document, if documents are to be separate
    is_chat: bool  # whether samples are conversations with marks, see `chat_loss`
    note: str  # a line about the data; may be empty


def open_corpus(config: TextConfig, own_tokenizer: str | None = None) -> Corpus:
    """Prepare the tokens once per host, and map them into memory.

    The model's `own_tokenizer`, a tokenizer.json, is used for text if the config names none.

    Errors: ConfigError: options conflict; DataError: data is missing, unreadable, empty or too short.
    """
    check_data(config)
    tokenizer: Mapping[str, bytes]
    end: Callable[[], int | None]
    if config.tokens:
        prepared = [(name, _describe_npy_once(name, config.heldout)) for name in config.names]
        own = TokenizerEncoder(own_tokenizer) if own_tokenizer else None
        tokenizer, end = (own.files(), own.end_id) if own else ({}, lambda: None)
    else:
        sources = _sources(config, own_tokenizer)
        prepared = [(source.name, _tokenize_once(source, config.heldout)) for source in sources]
        tokenizer, end = sources[0].tokenizer(), sources[0].end
    train = [_train_windows(name, file, config) for name, file in prepared]
    kind = Rows if config.chat else Windows
    heldout = [kind(file, file.train, file.heldout, config.seq_len) for _, file in prepared]
    heldout = [windows for windows in heldout if len(windows)]
    digests = [file.digest for _, file in prepared] + ([str(config.weights)] if config.weights else [])
    weight = float(config.seq_len)
    if config.chat:  # the mean of a few samples of each source
        few = [int((one[i] & COUNTED).sum()) for one in train for i in range(0, len(one), -(-len(one) // _SAMPLES))]
        weight = max(1.0, sum(few) / len(few))
    return Corpus(
        train=_joined(train, config.weights),
        heldout=_joined(heldout, None) if heldout else None,
        vocabulary=max(file.vocabulary for _, file in prepared) >> (MARKS if config.chat else 0),
        nominal_weight=weight,
        digest=digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest(),
        tokenizer=tokenizer,
        end=_end_token(config, end(), train) if config.separate and not config.chat else None,
        is_chat=bool(config.chat),
        note="; ".join(f"{name}: {file.note}" for name, file in prepared if file.note),
    )


def _end_token(config: TextConfig, known: int | None, train: Sequence[Windows]) -> int:
    """Return the id of the last token of each document. Errors: ConfigError: it is unknown."""
    end = known if config.end_token is None else config.end_token
    if end is None:
        raise ConfigError(
            "the last token of a document is unknown",
            expected="its id, or a tokenizer with a known one, for --data.documents separate",
            next_step="use --data.end_token ID, or --data.documents joined",
        )
    if not any((windows.ids()[:_LOOKED_AT] == end).any() for windows in train):
        log.warning("none of the first documents ends with the token %d: they are not separate", end)
    return end


def _joined(parts: Sequence[Dataset[Any]], weights: list[float] | None) -> Dataset[Any]:
    from torch.utils.data import ConcatDataset

    from hvdtrain.data.mixture import Mixture

    if weights is not None:
        return Mixture(parts, weights)
    return parts[0] if len(parts) == 1 else ConcatDataset(parts)


def _train_windows(name: str, file: TokenFile, config: TextConfig) -> Windows:
    train = (Rows if config.chat else Windows)(file, 0, file.train, config.seq_len)
    if not len(train):
        raise DataError(
            f"there are too few tokens in {name}",
            expected=f"at least {config.seq_len + 1} to train on, one more than data.seq_len",
            found=f"{file.train}, and {file.heldout} held out",
            next_step="provide more data, or a smaller --data.seq_len",
        )
    if file.heldout <= config.seq_len and config.heldout:
        log.warning("%s: the %d held-out tokens are too few for one sample: no evaluation", name, file.heldout)
    return train


def _sources(config: TextConfig, own_tokenizer: str | None) -> list[Source]:
    tokenizer = config.tokenizer or own_tokenizer
    encoder = TokenizerEncoder(tokenizer) if tokenizer else ByteEncoder()
    if config.dataset:
        return [dataset_source(name, encoder, wants_text=bool(config.tokenizer)) for name in config.names]
    if config.text or config.chat:
        groups = [[name] for name in config.names] if config.weights is not None else [config.names]
        return _file_sources(config, groups, encoder)
    return [replace(text_source(standard_library(), encoder, config.heldout), name="the standard library")]


def _file_sources(config: TextConfig, groups: list[list[str]], encoder: Encoder) -> list[Source]:
    """Make a source of each group of patterns. A file in two of them could be held out in one only."""
    option = "--data.chat" if config.chat else "--data.text"
    listed = [files_matching(patterns, option) for patterns in groups]
    seen: dict[Path, int] = {}
    for number, files in enumerate(listed):
        for file in files:
            if (other := seen.setdefault(file.path, number)) != number:
                raise ConfigError(
                    "a file is in two sources with weights",
                    expected="patterns without common files",
                    found=f"{file.path} matches {groups[other][0]!r} and {groups[number][0]!r}",
                    next_step=f"make the patterns of {option} narrower",
                )
    if config.chat:
        return [chat_source(files, encoder, config.heldout, config.seq_len) for files in listed]
    return [text_source(files, encoder, config.heldout) for files in listed]


def _tokenize_once(source: Source, heldout: float) -> TokenFile:
    def build(folder: Path) -> None:
        log.info("tokenizing %s", source.name)
        heldout_ids = source.heldout()
        parts = (
            _with_progress(source.train(), f"tokenizing {source.name}"),
            None if heldout_ids is None else _with_progress(heldout_ids, f"tokenizing held-out part of {source.name}"),
        )
        file = write_tokens(folder, *parts, tail=heldout, vocabulary=source.vocabulary(), note=source.note)
        if not file.train + file.heldout:
            raise DataError(f"{source.name} is empty", expected="tokens to train on", found=file.note or "no tokens")

    return _cached(build, [source.identity, heldout])


def _with_progress(pieces: Iterable[Ids], what: str) -> Iterator[Ids]:
    """Yield the pieces. Report the number of ids every few seconds."""
    count, begin = 0, time.monotonic()
    reported = begin
    for piece in pieces:
        yield piece
        count += len(piece)
        if (now := time.monotonic()) - reported >= _PROGRESS_S:
            log.info("%s: %.1f million tokens, %.0f s", what, count / 1e6, now - begin)
            reported = now


def _describe_npy_once(tokens: str, heldout: float) -> TokenFile:
    path = Path(tokens).expanduser().resolve()
    try:
        about = path.stat()
    except OSError as error:
        raise DataError(
            f"cannot read the tokens {tokens!r}",
            expected="a .npy file of token ids",
            found=f"{error.strerror}; working directory {Path.cwd()}",
            next_step=hub_advice(tokens) or "correct --data.tokens",
        ) from error
    return _cached(
        lambda folder: describe_npy(path, heldout).save(folder), [str(path), about.st_size, about.st_mtime_ns, heldout]
    )


def _cached(build: Callable[[Path], None], identity: list[Any]) -> TokenFile:
    key = hashlib.sha256(json.dumps([FORMAT, identity]).encode()).hexdigest()[:24]
    folder = once_per_host("corpus", key, build, lambda folder: TokenFile.load(folder) is not None)
    file = TokenFile.load(folder)
    assert file, folder
    return file
