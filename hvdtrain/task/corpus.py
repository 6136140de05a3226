"""Training data of a language model: the windows of tokens that its options select."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hvdtrain.errors import ConfigError, DataError, listed
from hvdtrain.files import is_url
from hvdtrain.task.chat import COUNTED, MARKS, chat_source
from hvdtrain.task.dataset_source import dataset_source
from hvdtrain.task.encode import ByteEncoder, Encoder, Ids, TokenizerEncoder
from hvdtrain.task.formats import FORMATS
from hvdtrain.task.once_per_host import once_per_host
from hvdtrain.task.source_files import files_matching, hub_advice
from hvdtrain.task.streamed_text import LARGEST, UNIT_BYTES, StreamedText
from hvdtrain.task.text_config import TextConfig, check_data
from hvdtrain.task.text_sources import Source, has_rows, standard_library, text_source
from hvdtrain.task.token_file import FORMAT, Rows, TokenFile, Windows, describe_npy, write_tokens

if TYPE_CHECKING:
    from torch.utils.data import Dataset


log = logging.getLogger(__name__)

_LOOKED_AT = 1 << 24  # tokens of a source to look for the end of a document in

_PROGRESS_S = 10.0  # seconds between lines in the log while text is tokenized

Show = Callable[[str, float | None, int, float], None]
"""Shows how far the ids of something are made: what it is, the fraction of files that is read, ids, seconds."""

_SAMPLES = 64  # samples of a source from which the typical number of tokens with a loss is computed


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
    note: str  # a line about the data; may be empty


def prepare_corpus(config: TextConfig, own_tokenizer: str | None, show: Show | None) -> list[tuple[str, TokenFile]]:
    """Make the tokens that `open_corpus` maps, if they are not there yet; return them with the names of their sources.

    `show` is called at each piece of a source; without it, lines are logged. Errors: those of `open_corpus`.
    """
    check_data(config)
    if config.streaming:
        raise ConfigError("data.streaming leaves nothing to prepare", next_step="omit it")
    parts = [(config if not config.validation else replace(config, heldout=0.0), f"--data.{config.kind}")]
    if config.validation:
        parts.append((_of_validation(config), "--data.validation"))
    return [each for part, option in parts for each in _prepare(part, own_tokenizer, option, show).files]


def open_corpus(config: TextConfig, own_tokenizer: str | None = None) -> Corpus:
    """Prepare the tokens once per host, and map them into memory.

    The model's `own_tokenizer`, a tokenizer.json, is used for text if the config names none.

    Errors: ConfigError: options conflict; DataError: data is missing, unreadable, empty or too short.
    """
    check_data(config)
    if config.streaming:
        return _streamed(config, own_tokenizer)
    training = replace(config, heldout=0.0) if config.validation else config
    own = _prepare(training, own_tokenizer, f"--data.{config.kind}")
    train = [_windows(*each, training) for each in own.files]
    kind, files = (Rows if config.chat else Windows), own.files
    heldout = [kind(file, file.train, file.heldout, config.seq_len) for _, file in files]
    heldout = [windows for windows in heldout if len(windows)]
    if config.validation:
        other = _prepare(_of_validation(config), own_tokenizer, "--data.validation")
        heldout = [_windows(*each, training) for each in other.files]
        files = [*files, *other.files]
        if common := own.paths & other.paths:
            log.warning("--data.validation is trained on, too: %s", listed(sorted(common)))
    digests = [file.digest for _, file in files] + ([str(config.weights)] if config.weights else [])
    weight = float(config.seq_len)
    if config.chat:  # the mean of a few samples of each source
        few = [int((one[i] & COUNTED).sum()) for one in train for i in range(0, len(one), -(-len(one) // _SAMPLES))]
        weight = max(1.0, sum(few) / len(few))
    return Corpus(
        train=_joined(train, config.weights),
        heldout=_joined(heldout, None) if heldout else None,
        vocabulary=max(file.vocabulary for _, file in files) >> (MARKS if config.chat else 0),
        nominal_weight=weight,
        digest=digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest(),
        tokenizer=own.tokenizer,
        end=_end_token(config, own.end(), train) if config.separate and not config.chat else None,
        note="; ".join(f"{name}: {file.note}" for name, file in files if file.note),
    )


def _streamed(config: TextConfig, own_tokenizer: str | None) -> Corpus:
    (source,) = _sources(replace(config, heldout=0.0), own_tokenizer, "--data.text")
    documents, files = source.documents, source.documents.files
    size = sum(file.size_bytes for file in files)
    large = [file for file in files if file.size_bytes > LARGEST and not has_rows([file])]
    if size < UNIT_BYTES or large:
        raise ConfigError(
            "--data.streaming is not for this text",
            expected=f"{UNIT_BYTES:,} bytes or more, and at most {LARGEST:,} in a plain file, which is one document",
            found=f"{large[0].size_bytes:,} bytes in {large[0].path}" if large else f"{size:,} bytes",
            next_step="divide it into rows, such as .jsonl" if large else "omit --data.streaming",
        )
    field = f", by field {documents.name!r}" if has_rows(files) else ""
    first = next(documents.read(files[0], documents.skipped), None)
    same: list[Any] = [[f.name, f.size_bytes, f.version if is_url(f.path) else 0] for f in files]  # on all hosts
    same += [source.identity[0], config.field, config.on_error, str(first and b"".join(first[0].pieces))]
    key, digest = (hashlib.sha256(json.dumps([FORMAT, each]).encode()).hexdigest() for each in (source.identity, same))
    held = replace(_of_validation(config), streaming=False)
    other = open_corpus(held, own_tokenizer) if config.validation else None
    if common := {file.path for file in (files_matching(held.names) if other else ())} & set(source.paths):
        log.warning("--data.validation is trained on, too: %s", listed(sorted(common)))
    return Corpus(
        train=StreamedText(documents, source.encoder, config.seq_len, key, digest),
        heldout=other.train if other is not None else None,
        vocabulary=source.vocabulary(),
        nominal_weight=float(config.seq_len),
        digest=digest,
        tokenizer=source.tokenizer(),
        end=_end_token(config, source.end(), []) if config.separate else None,
        note=f"{len(files)} file{'s'[: len(files) > 1]}, tokenized while they are read{field}",
    )


def _of_validation(config: TextConfig) -> TextConfig:
    validating: dict[str, Any] = {config.kind: config.validation}
    return replace(config, **validating, validation=None, heldout=0.0)


class _Prepared(NamedTuple):
    files: list[tuple[str, TokenFile]]  # of each source, with its name
    paths: Set[str]  # of the files or folders that were read
    tokenizer: Mapping[str, bytes]
    end: Callable[[], int | None]


def _prepare(config: TextConfig, own_tokenizer: str | None, option: str, show: Show | None = None) -> _Prepared:
    """Tokenize the data that `option` names, once per host."""
    if config.tokens:
        files = [(name, _describe_npy_once(name, config.heldout, option)) for name in config.names]
        own = TokenizerEncoder(own_tokenizer) if own_tokenizer else None
        return _Prepared(files, set(config.names), own.files() if own else {}, own.end_id if own else lambda: None)
    sources = _sources(config, own_tokenizer, option)
    files = [(source.name, _tokenize_once(source, config.heldout, show)) for source in sources]
    return _Prepared(files, {path for s in sources for path in s.paths}, sources[0].tokenizer(), sources[0].end)


def _end_token(config: TextConfig, known: int | None, train: Sequence[Windows]) -> int:
    """Return the id of the last token of each document. Errors: ConfigError: it is unknown."""
    end = known if config.end_token is None else config.end_token
    if end is None:
        raise ConfigError(
            "the last token of a document is unknown",
            expected="its id, or a tokenizer with a known one, for --data.documents separate",
            next_step="use --data.end_token ID, or --data.documents joined",
        )
    if train and not any((windows.ids()[:_LOOKED_AT] == end).any() for windows in train):
        log.warning("none of the first documents ends with the token %d: they are not separate", end)
    return end


def _joined(parts: Sequence[Dataset[Any]], weights: list[float] | None) -> Dataset[Any]:
    from torch.utils.data import ConcatDataset

    from hvdtrain.data.mixture import Mixture

    if weights is not None:
        return Mixture(parts, weights)
    return parts[0] if len(parts) == 1 else ConcatDataset(parts)


def _windows(name: str, file: TokenFile, config: TextConfig) -> Windows:
    """Return all windows that are not held out. Errors: DataError: there is none."""
    windows = (Rows if config.chat else Windows)(file, 0, file.train, config.seq_len)
    if not len(windows):
        raise DataError(
            f"there are too few tokens in {name}",
            expected=f"at least {config.seq_len + 1}, one more than data.seq_len",
            found=f"{file.train}, and {file.heldout} held out",
            next_step="provide more data, or a smaller --data.seq_len",
        )
    if file.heldout <= config.seq_len and config.heldout:
        log.warning("%s: the %d held-out tokens are too few for one sample: no evaluation", name, file.heldout)
    return windows


def _sources(config: TextConfig, own_tokenizer: str | None, option: str) -> list[Source]:
    tokenizer = config.tokenizer or own_tokenizer
    encoder = TokenizerEncoder(tokenizer) if tokenizer else ByteEncoder()
    if config.dataset:
        return [dataset_source(name, encoder, option, wants_text=bool(config.tokenizer)) for name in config.names]
    if config.text or config.chat:
        groups = [[name] for name in config.names] if config.weights is not None else [config.names]
        return _file_sources(config, groups, encoder, option)
    return [replace(text_source(standard_library(), encoder, config.heldout), name="the standard library")]


def _file_sources(config: TextConfig, groups: list[list[str]], encoder: Encoder, option: str) -> list[Source]:
    """Make a source of each group of patterns. A file in two of them could be held out in one only."""
    listed_files = [files_matching(patterns, option) for patterns in groups]
    seen: dict[str, int] = {}
    for number, files in enumerate(listed_files):
        for file in files:
            if (other := seen.setdefault(file.path, number)) != number:
                raise ConfigError(
                    "a file is in two sources with weights",
                    expected="patterns without common files",
                    found=f"{file.path} matches {groups[other][0]!r} and {groups[number][0]!r}",
                    next_step=f"make the patterns of {option} narrower",
                )
    skips = config.on_error == "skip"
    if config.chat:
        return [chat_source(files, encoder, config.heldout, config.seq_len, skips=skips) for files in listed_files]
    if config.field and not any(map(has_rows, listed_files)):
        raise ConfigError(
            f"--data.field {config.field} has no effect",
            expected=f"files with rows: {', '.join(FORMATS)}",
            found=listed(seen),
            next_step="omit it, or end the names of the files in their format",
        )
    return [text_source(files, encoder, config.heldout, name=config.field, skips=skips) for files in listed_files]


def _tokenize_once(source: Source, heldout: float, show: Show | None) -> TokenFile:
    shown = show or _log_sometimes()

    def watched(pieces: Iterable[Ids], what: str) -> Iterator[Ids]:
        count, begin, read = 0, time.monotonic(), source.read
        if read is not None:
            read.begin()
        for piece in pieces:
            yield piece
            count += len(piece)
            shown(what, read.fraction() if read is not None else None, count, time.monotonic() - begin)

    def build(folder: Path) -> None:
        if show is None:
            log.info("tokenizing %s", source.name)
        heldout_ids = source.heldout()
        parts = (
            watched(source.train(), f"tokenizing {source.name}"),
            None if heldout_ids is None else watched(heldout_ids, f"tokenizing held-out part of {source.name}"),
        )
        about: dict[str, Any] = {"vocabulary": source.vocabulary(), "note": source.note, "skip": source.skip}
        file = write_tokens(folder, *parts, tail=heldout, **about)
        if not file.train + file.heldout:
            raise DataError(f"{source.name} is empty", expected="tokens to train on", found=file.note or "no tokens")

    return _cached(build, [source.identity, heldout], continues=True)


def _log_sometimes() -> Show:
    reported_s = 0.0

    def show(what: str, fraction: float | None, count: int, seconds: float) -> None:
        nonlocal reported_s
        if seconds < reported_s:  # another one has begun
            reported_s = 0.0
        if seconds - reported_s >= _PROGRESS_S:
            reported_s = seconds
            share = "" if fraction is None else f"{fraction:.0%}, "
            log.info("%s: %s%.1f million tokens, %.0f s", what, share, count / 1e6, seconds)

    return show


def _describe_npy_once(tokens: str, heldout: float, option: str) -> TokenFile:
    path = Path(tokens).expanduser().resolve()
    try:
        about = path.stat()
    except OSError as error:
        raise DataError(
            f"cannot read the tokens {tokens!r}",
            expected="a .npy file of token ids",
            found=f"{error.strerror}; working directory {Path.cwd()}",
            next_step=hub_advice(tokens) or f"correct {option}",
        ) from error
    return _cached(
        lambda folder: describe_npy(path, heldout).save(folder), [str(path), about.st_size, about.st_mtime_ns, heldout]
    )


def _cached(build: Callable[[Path], None], identity: list[Any], *, continues: bool = False) -> TokenFile:
    key = hashlib.sha256(json.dumps([FORMAT, identity]).encode()).hexdigest()[:24]
    folder = once_per_host("corpus", key, build, lambda it: TokenFile.load(it) is not None, continues=continues)
    file = TokenFile.load(folder)
    assert file, folder
    return file
