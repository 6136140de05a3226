"""Encode conversations by the chat template of a tokenizer, and mark the tokens of the assistant."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from hvdtrain.errors import ConfigError, DataError, HvdtrainError
from hvdtrain.task.base import import_library
from hvdtrain.task.conversations import Conversation
from hvdtrain.task.encode import END_TOKENS, ByteEncoder, Encoder
from hvdtrain.task.tokenizer_files import SETTINGS, settings

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")

BYTE_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
"""Chat template if each byte is a token: lines ``role: content``. The separator ends the assistant's content."""


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

    Args:
        files: of the tokenizer, by name.

    Errors:
        ConfigError: the tokenizer has no chat template.
        DataError: the files are damaged.
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

        Errors:
            DataError: the template refuses the conversation, or does not show its turns.
        """
        try:
            ids, counted = self._by_marks(conversation) if self._has_marks else self._by_prefixes(conversation)
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
    def _has_marks(self) -> bool:
        return bool(_MARK.search(self._tokenizer.get_chat_template()))

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
