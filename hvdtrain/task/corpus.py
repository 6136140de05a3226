"""Training data of a language model: options, and the windows of tokens that they select."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.errors import ConfigError, DataError
from hvdtrain.task.dataset_source import dataset_source
from hvdtrain.task.encode import ByteEncoder, TokenizerEncoder
from hvdtrain.task.once_per_host import once_per_host
from hvdtrain.task.text_sources import Source, files_matching, standard_library, text_source
from hvdtrain.task.token_file import FORMAT, TokenFile, Windows, describe_npy, write_tokens

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TextConfig:
    """Training data. The default is the source code of Python's standard library, as bytes.

    Attributes:
        text: train on text files: names or quoted patterns such as 'books/**/*.txt'. Some of the files are held out,
            or the end of the file if there is only one (default: source code of Python's standard library)
        tokens: train on token ids: a .npy file with one dimension of integers. Its end is held out (default: use
            data.text)
        dataset: train on a folder written by datasets' save_to_disk, with a column text or input_ids. Its validation or
            test split is held out, otherwise its end (default: use data.text)
        tokenizer: tokenizer.json for the text (default: the tokenizer of model.from, otherwise each byte is a
            token)
        seq_len: tokens per sample, and the weight of a sample in the loss
        heldout: fraction of the data to hold out for evaluation
    """

    text: list[str] | str | None = None
    tokens: str | None = None
    dataset: str | None = None
    tokenizer: str | None = None
    seq_len: int = 128
    heldout: float = 0.05


class Corpus(NamedTuple):
    """Windows of one file of tokens."""

    train: Windows  # at least one
    heldout: Windows | None  # None if there are too few tokens for one
    tokenizer: Mapping[str, bytes]  # its files for transformers, by name; empty if it is unknown


def open_corpus(config: TextConfig, own_tokenizer: str | None = None) -> Corpus:
    """Prepare the tokens once per host, and map them into memory.

    The model's `own_tokenizer`, a tokenizer.json, is used for text if the config names none.

    Errors:
        ConfigError: options conflict.
        DataError: data is missing, unreadable, empty or too short.
    """
    _check(config)
    tokenizer: Mapping[str, bytes]
    if config.tokens:
        name, file = config.tokens, _describe_npy_once(config.tokens, config.heldout)
        tokenizer = TokenizerEncoder(own_tokenizer).files() if own_tokenizer else {}
    else:
        source = _source(config, own_tokenizer)
        name, file = source.name, _tokenize_once(source, config.heldout)
        tokenizer = source.tokenizer()
    train = Windows(file, 0, file.train, config.seq_len)
    heldout = Windows(file, file.train, file.heldout, config.seq_len)
    if not len(train):
        raise DataError(
            f"there are too few tokens in {name}",
            expected=f"at least {config.seq_len + 1} to train on, one more than data.seq_len",
            found=f"{file.train}, and {file.heldout} held out",
            next_step="provide more data, or a smaller --data.seq_len",
        )
    if not len(heldout) and config.heldout:
        log.warning("%s: the %d held-out tokens are too few for one sample: no evaluation", name, file.heldout)
    return Corpus(train, heldout if len(heldout) else None, tokenizer)


def _check(config: TextConfig) -> None:
    given = [name for name in ("text", "tokens", "dataset") if getattr(config, name)]
    if len(given) > 1:
        raise ConfigError(
            "more than one source of data is set",
            expected="one of data.text, data.tokens, data.dataset, or none for the standard library",
            found=" and ".join(f"data.{name}" for name in given),
        )
    if config.tokens and config.tokenizer:
        raise ConfigError(
            "data.tokens and data.tokenizer conflict",
            expected="a tokenizer only for text; data.tokens contains ids",
            next_step="omit --data.tokenizer",
        )
    if config.seq_len < 1:
        raise ConfigError("invalid --data.seq_len", expected="1 or more", found=str(config.seq_len))
    if not 0 <= config.heldout < 1:
        raise ConfigError("invalid --data.heldout", expected="0 or more, and less than 1", found=str(config.heldout))


def _source(config: TextConfig, own_tokenizer: str | None) -> Source:
    tokenizer = config.tokenizer or own_tokenizer
    encoder = TokenizerEncoder(tokenizer) if tokenizer else ByteEncoder()
    if config.dataset:
        return dataset_source(config.dataset, encoder, wants_text=bool(config.tokenizer))
    if config.text:
        patterns = [config.text] if isinstance(config.text, str) else config.text
        return text_source(files_matching(patterns), encoder, config.heldout)
    return replace(text_source(standard_library(), encoder, config.heldout), name="the standard library")


def _tokenize_once(source: Source, heldout: float) -> TokenFile:
    def build(folder: Path) -> None:
        log.info("tokenizing %s", source.name)
        vocabulary = source.vocabulary()
        file = write_tokens(folder, source.train(), source.heldout(), tail=heldout, vocabulary=vocabulary)
        if not file.train + file.heldout:
            raise DataError(f"{source.name} is empty", expected="tokens to train on", found="no tokens")

    return _cached(build, [source.identity, heldout])


def _describe_npy_once(tokens: str, heldout: float) -> TokenFile:
    path = Path(tokens).expanduser().resolve()
    try:
        about = path.stat()
    except OSError as error:
        raise DataError(
            f"cannot read the tokens {tokens!r}",
            expected="a .npy file of token ids",
            found=f"{error.strerror}; working directory {Path.cwd()}",
            next_step="correct --data.tokens",
        ) from error
    return _cached(
        lambda folder: describe_npy(path, heldout).save(folder),
        [str(path), about.st_size, about.st_mtime_ns, heldout],
    )


def _cached(build: Callable[[Path], None], identity: list[Any]) -> TokenFile:
    key = hashlib.sha256(json.dumps([FORMAT, identity]).encode()).hexdigest()[:24]
    folder = once_per_host("corpus", key, build, lambda folder: TokenFile.load(folder) is not None)
    file = TokenFile.load(folder)
    assert file, folder
    return file
