"""Bytes of a tensor, by what Horovod says of it where its collective ends."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson

_ITEM_BYTES = {
    "uint8": 1,
    "int8": 1,
    "bool": 1,
    "uint16": 2,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
}
_SHAPE = re.compile(r"\[\s*(?:\d{1,18}\s*(?:,\s*\d{1,18}\s*)*)?\]")
_MOST = 1 << 62

UNREADABLE = -2
"""What is no arguments at all."""


def nbytes(arguments: Mapping[str, Any]) -> int:
    """Of ``{"dtype": "float32", "shape": "[2, 3]"}``; -1 where it does not say."""
    item, shape = _ITEM_BYTES.get(str(arguments.get("dtype"))), arguments.get("shape")
    if item is None or not isinstance(shape, str) or not _SHAPE.fullmatch(shape):
        return -1
    total = item
    for length in shape.strip("[] ").split(","):
        total *= int(length) if length.strip() else 1
    return total if total < _MOST else -1


class Sizes(dict[bytes, int]):
    """By ``, "args": {...}}`` as the file has it, each read once: `UNREADABLE` where it is not JSON."""

    def __missing__(self, text: bytes) -> int:
        try:
            arguments = orjson.loads(b"{" + text.lstrip(b", "))["args"]
            found = nbytes(arguments) if isinstance(arguments, dict) else UNREADABLE
        except (ValueError, KeyError):
            found = UNREADABLE
        if len(self) < 1 << 16:
            self[text] = found
        return found
