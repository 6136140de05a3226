"""Conversations of files as samples of a fixed length, by the chat template of a tokenizer.

A sample has several whole conversations, with marks of first and counted tokens: those of the assistant. trl's packing
is not used: it makes a dataset of lists in memory and on the disk.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.errors import ConfigError, DataError, HvdtrainError
from hvdtrain.task.base import import_library
from hvdtrain.task.encode import END_TOKENS, SETTINGS, ByteEncoder, Encoder, Ids, settings
from hvdtrain.task.formats import Row, Skipped, read_rows
from hvdtrain.task.source_files import SourceFile
from hvdtrain.task.text_sources import Source, is_held

Message = dict[str, Any]

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")

BYTE_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
"""Chat template if each byte is a token: lines ``role: content``. The separator ends the assistant's content."""

_FORMAT = 1

COUNTED, FIRST, MARKS = 1, 2, 2
"""Marks of a token of a conversation, in the lowest `MARKS` bits before its id: it has a loss; it is the first one."""


class Conversation(NamedTuple):
    """Messages with role and content, and the place where they were read."""

    messages: list[Message]
    place: str


def read_conversations(files: Iterable[SourceFile], skipped: Skipped) -> Iterator[Conversation]:
    """Yield the conversation of each row.

    It has `messages`, or `prompt` and `completion`: the texts of one user and one assistant message.

    Errors: DataError: a file cannot be read, or a row is no conversation and may not be left out.
    """
    for row in (row for file in files for row in read_rows(file, ("messages", "prompt", "completion", "tools"))):
        try:
            conversation = Conversation(_messages(row), row.place)
        except DataError as error:
            skipped.add("no conversation", row.place, error)
        else:
            yield conversation


def _messages(read: Row) -> list[Message]:
    row, place = read.values, read.place
    if read.broken or not isinstance(row, dict):
        raise _wrong(place, read.broken or type(row).__name__)
    if row.get("tools"):
        raise _wrong(place, "tools, which are not supported")
    if "messages" not in row and {"prompt", "completion"} <= row.keys():
        texts = row["prompt"], row["completion"]
        row["messages"] = [{"role": r, "content": t} for r, t in zip(("user", "assistant"), texts, strict=True)]
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _wrong(place, "no messages" if messages else ", ".join(row) or "an empty object")
    for position, message in enumerate(messages, 1):
        found = message if isinstance(message, dict) else {}
        for key in ("role", "content"):
            if not isinstance(found.get(key), str):
                raise _wrong(place, f"message {position} without a text as {key}")
    return messages


def _wrong(place: str, found: str) -> DataError:
    return DataError(
        f"{place} is not a conversation",
        expected="a JSON object with messages (a list of objects with role and content), or with prompt and completion",
        found=found,
        next_step="correct or remove the line, or leave such lines out: --data.on_error skip",
    )


def chat_files(encoder: Encoder) -> Mapping[str, bytes]:
    """Return the files of a tokenizer for transformers, by name; that of bytes with `BYTE_TEMPLATE`."""
    files = encoder.files()
    if isinstance(encoder, ByteEncoder):
        return {**files, SETTINGS: settings(END_TOKENS[0], chat_template=BYTE_TEMPLATE)}
    return files


class Encoded(NamedTuple):
    """Ids of a conversation, and for each whether it has a loss."""

    ids: list[int]
    counted: list[bool]


class ChatEncoder:
    """A tokenizer of transformers with a chat template, read on first use.

    Errors: ConfigError: the tokenizer has no chat template; DataError: the files are damaged.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = files

    def vocabulary(self) -> int:
        """Return one more than the largest id."""
        return int(max(self._tokenizer.get_vocab().values())) + 1

    def encode(self, conversation: Conversation) -> Encoded:
        """Return the ids of a conversation. Those of the assistant's turns have a loss, but never the first one.

        The template marks these turns by ``{% generation %}``. Without such marks, a turn is what the template adds
        for it to the messages before and the generation prompt.

        Errors: DataError: the template refuses the conversation, or does not show its turns.
        """
        try:
            has_marks = _MARK.search(self._tokenizer.get_chat_template())
            ids, counted = self._by_marks(conversation) if has_marks else self._by_prefixes(conversation)
        except HvdtrainError:
            raise
        except Exception as error:  # templates raise errors of jinja2 and their own
            raise DataError(
                f"the chat template refuses {conversation.place}", found=f"{type(error).__name__}: {error}"
            ) from error
        return Encoded(ids, [False, *counted[1:]])

    def _by_marks(self, conversation: Conversation) -> tuple[list[int], list[bool]]:
        found = self._tokenizer.apply_chat_template(
            conversation.messages, return_dict=True, return_assistant_tokens_mask=True
        )
        counted = [bool(mark) for mark in found["assistant_masks"]]
        # transformers marks only the first token of the last character of a turn.
        spans = found.encodings[0].offsets
        for place in range(1, len(counted)):
            counted[place] |= counted[place - 1] and spans[place] == spans[place - 1]
        return found["input_ids"], counted

    def _by_prefixes(self, conversation: Conversation) -> tuple[list[int], list[bool]]:
        messages = conversation.messages
        whole = self._ids(messages)
        counted = [False] * len(whole)
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._ids(messages[:number], add_generation_prompt=True) if number else []
            after = self._ids(messages[: number + 1])
            if not before or after[: len(before)] != before or whole[: len(after)] != after:
                raise DataError(
                    f"the assistant's tokens cannot be found in {conversation.place}",
                    expected="a chat template that only adds tokens for each message, and a message before the"
                    " assistant's first one",
                    found=f"other tokens before message {number + 1}, of the assistant",
                    next_step="mark the assistant's content in the chat template: {% generation %} ... "
                    "{% endgeneration %}",
                )
            counted[len(before) : len(after)] = [True] * (len(after) - len(before))
        return whole, counted

    def _ids(self, messages: list[dict[str, Any]], **more: Any) -> list[int]:
        found: list[int] = self._tokenizer.apply_chat_template(messages, return_dict=True, **more)["input_ids"]
        return found

    @cached_property
    def _tokenizer(self) -> Any:
        transformers = import_library("transformers", "--data.chat", "lm")
        with TemporaryDirectory() as folder:
            for name, content in self.files.items():
                (Path(folder) / name).write_bytes(content)
            try:
                found = transformers.AutoTokenizer.from_pretrained(
                    folder, local_files_only=True, trust_remote_code=False
                )
            except Exception as error:  # of each class of tokenizers
                raise DataError(
                    "transformers cannot read the tokenizer",
                    expected="tokenizer.json and tokenizer_config.json",
                    found=f"{type(error).__name__}: {error}",
                    next_step="correct --data.tokenizer",
                ) from error
        if not found.chat_template:
            raise ConfigError(
                "the tokenizer has no chat template",
                expected="chat_template.jinja, or chat_template in tokenizer_config.json, next to tokenizer.json",
                next_step="write chat_template.jinja there. To train on bytes, which have a template, omit"
                " --data.tokenizer",
            )
        return found


def chat_source(
    files: Sequence[SourceFile], encoder: Encoder, heldout: float, seq_len: int, *, skips: bool = False
) -> Source:
    """Make a source of samples, each of seq_len + 1 ids with marks.

    The fraction `heldout` of the conversations is held out, evenly spread. A longer conversation loses its end. One
    without a counted token is left out. `skips`: so are rows that are no conversation, otherwise they are refused.
    """
    tokenizer = chat_files(encoder)
    digest = hashlib.sha256()
    for part, content in sorted(tokenizer.items()):
        digest.update(f"{part} {len(content)} ".encode() + content)
    rows = _Rows(files, ChatEncoder(tokenizer), heldout, seq_len + 1, Skipped(skips))
    return Source(
        name=files[0].name if len(files) == 1 else f"{len(files)} files",
        identity=[
            "chat", _FORMAT, seq_len, digest.hexdigest(), *(["skips"] if skips else []), *(f.identity for f in files)
        ],
        train=lambda: rows.ids(held=False),
        heldout=lambda: rows.ids(held=True),
        vocabulary=lambda: rows.encoder.vocabulary() << MARKS,
        tokenizer=lambda: tokenizer,
        end=lambda: None,
        paths=[file.path for file in files],
        note=rows.note,
    )  # fmt: skip


@dataclass
class _Rows:
    files: Sequence[SourceFile]
    encoder: ChatEncoder
    heldout: float
    length: int
    skipped: Skipped
    truncated: int = field(default=0, init=False)
    dropped: int = field(default=0, init=False)
    used: int = field(default=0, init=False)

    def note(self) -> str:
        """Return what was left out, after all conversations have been read."""
        text = f"{self.used:,} conversations"
        if self.truncated:
            text += f", {self.truncated:,} of them truncated to {self.length:,} tokens"
        if self.dropped:
            text += f"; {self.dropped:,} without a token of the assistant in {self.length:,} tokens are left out"
        return text + self.skipped.note()

    def ids(self, *, held: bool) -> Iterator[Ids]:
        """Yield samples of conversations that are held out, or of the others: (length,)."""
        row: list[int] = []
        for one in self._encoded(held):
            if len(row) + len(one.ids) > self.length:
                yield np.asarray(_padded(row, self.length), np.int64)
                row = []
            row += [id_ << MARKS | (COUNTED if c else 0) for id_, c in zip(one.ids, one.counted, strict=True)]
            row[-len(one.ids)] |= FIRST
        if row:
            yield np.asarray(_padded(row, self.length), np.int64)

    def _encoded(self, held: bool) -> Iterator[Encoded]:
        skipped = Skipped(self.skipped.allowed) if held else self.skipped
        read = read_conversations(self.files, skipped) if self.heldout or not held else ()
        for number, conversation in enumerate(read):
            if is_held(number, self.heldout) != held:
                continue
            try:
                whole = self.encoder.encode(conversation)
            except DataError as error:
                self.skipped.add("refused by the chat template", conversation.place, error)
                continue
            kept = Encoded(whole.ids[: self.length], whole.counted[: self.length])
            if any(kept.counted):
                self.used += 1
                self.truncated += len(whole.ids) > self.length
                yield kept
            else:
                self.dropped += 1


def _padded(row: list[int], length: int) -> list[int]:
    """Fill a sample with id 0 as one more document, without a loss."""
    padding = length - len(row)
    return row + ([FIRST] + [0] * (padding - 1) if padding else [])
