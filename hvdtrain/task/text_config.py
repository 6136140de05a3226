"""Options of the training data of a language model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hvdtrain.errors import ConfigError

_KINDS = ("text", "tokens", "dataset", "chat")


@dataclass(frozen=True)
class TextConfig:
    """Training data. The default is the source code of Python's standard library, as bytes.

    Attributes:
        text: train on files: names, URLs or quoted patterns such as 'books/**/*.txt'. A row of a .jsonl, .csv or
            .parquet file is a document, other files are one each; all may be compressed (.gz, .zst). Some of the files
            are held out, or the end of the file if there is only one; with rows, some of the documents (default: source
            code of Python's standard library)
        tokens: train on token ids: .npy files with one dimension of integers. The end of each is held out (default: use
            data.text)
        dataset: train on folders written by datasets' save_to_disk, with a column text or input_ids. The validation or
            test split is held out, otherwise the end (default: use data.text)
        chat: train the assistant's turns of conversations: rows of files as for data.text, with messages, or prompt and
            completion, by the tokenizer's chat template. Samples are whole conversations, and some of them are held out
            (default: use data.text)
        validation: evaluate on this data, of the same kind as the data to train on, instead of holding some of it out:
            names of files or folders (default: hold out data.heldout)
        field: field of rows with the text, such as text, or meta.text for the field text in meta (default: text or
            content, otherwise the only one with text)
        on_error: what to do with a row that cannot be read, or has no text or conversation: refuse, with an error that
            names file and line, or skip, and count it
        weights: fraction of samples from each name in the option of the data, as [0.7, 0.3]; smaller sources repeat
            (default: each sample once per epoch)
        tokenizer: tokenizer.json for the text (default: the tokenizer of model.from, otherwise each byte is a
            token)
        documents: what a token sees of its sample: joined, all tokens before it; separate, those of its own document
            or conversation, and positions restart with each (default: separate for data.chat, otherwise joined)
        end_token: id of the last token of each document, for data.documents separate (default: that of the tokenizer)
        seq_len: tokens per sample, and the weight of a sample in the loss
        heldout: fraction of the data to hold out for evaluation, if data.validation is not set
    """

    text: list[str] | str | None = None
    tokens: list[str] | str | None = None
    dataset: list[str] | str | None = None
    chat: list[str] | str | None = None
    validation: list[str] | str | None = None
    field: str | None = None
    on_error: Literal["refuse", "skip"] = "refuse"
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

    @property
    def kind(self) -> str:
        """The option of the data: text, tokens, dataset or chat."""
        return next((kind for kind in _KINDS if getattr(self, kind)), "text")


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
    if config.field is not None and not config.text:
        raise ConfigError(
            "data.field has no effect",
            expected="a field with the text of rows, for data.text",
            found=f"data.{config.kind}" if config.names else "no data.text",
            next_step="omit --data.field",
        )
    if config.validation and (config.weights is not None or config.heldout != TextConfig.heldout):
        other = "data.heldout" if config.weights is None else "data.weights"
        raise ConfigError(
            f"data.validation and {other} conflict",
            expected="one of them",
            next_step="omit one; null overrides data.validation and data.weights of a config file",
        )
    if config.weights is not None:
        from hvdtrain.data.mixture import whole_weights

        whole_weights(config.weights, len(config.names) or 1)
    if config.seq_len < 1:
        raise ConfigError("invalid --data.seq_len", expected="1 or more", found=str(config.seq_len))
    if not 0 <= config.heldout < 1:
        raise ConfigError("invalid --data.heldout", expected="0 or more, and less than 1", found=str(config.heldout))
