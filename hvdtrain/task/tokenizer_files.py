"""The files of a tokenizer, as the folder of a model has them for transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.errors import ConfigError
from hvdtrain.files import read_regular
from hvdtrain.task.base import import_library

TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
TOKENIZER_FILES = (TOKENIZER, SETTINGS, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")


def files_next_to(tokenizer: Path) -> dict[str, bytes]:
    """Return the content of a tokenizer.json, and of the files about it next to it, by name. Errors: OSError."""
    places = {TOKENIZER: tokenizer, **{name: tokenizer.with_name(name) for name in TOKENIZER_FILES[1:]}}
    return {name: read_regular(file) for name, file in places.items() if name == TOKENIZER or file.is_file()}


def settings(end: str | None, **more: Any) -> bytes:
    """Return a tokenizer_config.json for a tokenizer without one.

    Args:
        end: its token after each document, if any.
        more: further settings.
    """
    named = {} if end is None else {"eos_token": end, "pad_token": end}
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **named, **more}
    return json.dumps(content, indent=1).encode()


def load_tokenizer(folder: Path) -> Any:
    """Return transformers' tokenizer of a model's folder. Errors: ConfigError: there is none."""
    transformers = import_library("transformers", "a tokenizer", "lm")
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder} has no tokenizer, so text cannot be read and written",
            found=str(error).partition("\n")[0],
            next_step="train with --data.text, or copy the tokenizer's files next to the weights",
        ) from error


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
    """Return each byte by the character that the pre-tokenizer ByteLevel writes for it.

    A visible character of Latin-1 is itself. The other bytes are the characters from U+0100 on.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
