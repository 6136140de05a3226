"""Read conversations from JSONL files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from hvdtrain.errors import DataError

Message = dict[str, Any]


class Conversation(NamedTuple):
    """Messages with role and content, and the place where they were read."""

    messages: list[Message]
    place: str


def read_conversations(files: Iterable[Path]) -> Iterator[Conversation]:
    """Yield the conversation of each line that is not blank.

    A line has `messages`, or `prompt` and `completion`: the texts of one user and one assistant message.

    Errors:
        DataError: a file cannot be read, or a line is no conversation; the message names file and line.
    """
    for path in files:
        try:
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield Conversation(_messages(line, path, number), f"{path}, line {number}")
        except OSError as error:
            raise DataError(
                f"cannot read the file {path}",
                expected="a readable file",
                found=error.strerror,
                next_step="check its permissions, or exclude it from --data.chat",
            ) from error


def _messages(line: bytes, path: Path, number: int) -> list[Message]:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise _wrong(path, number, str(error)) from error
    if not isinstance(row, dict):
        raise _wrong(path, number, type(row).__name__)
    if row.get("tools"):
        raise _wrong(path, number, "tools, which are not supported")
    if "messages" not in row and {"prompt", "completion"} <= row.keys():
        texts = row["prompt"], row["completion"]
        row["messages"] = [{"role": r, "content": t} for r, t in zip(("user", "assistant"), texts, strict=True)]
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _wrong(path, number, "no messages" if messages else ", ".join(row) or "an empty object")
    for position, message in enumerate(messages, 1):
        found = message if isinstance(message, dict) else {}
        for key in ("role", "content"):
            if not isinstance(found.get(key), str):
                raise _wrong(path, number, f"message {position} without a text as {key}")
    return messages


def _wrong(path: Path, number: int, found: str) -> DataError:
    return DataError(
        f"{path}, line {number} is not a conversation",
        expected="a JSON object with messages (a list of objects with role and content), or with prompt and completion",
        found=found,
        next_step="correct or remove the line",
    )
