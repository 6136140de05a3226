"""Make text and values writable as UTF-8 and JSON: error messages may contain bytes that are not text. A leaf."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LARGEST = 1 << 63


def encodable(text: str) -> str:
    """Return the text with lone surrogates, which UTF-8 cannot encode, as escapes."""
    return text.encode("utf-8", errors="backslashreplace").decode("utf-8")


def plain(value: Any) -> Any:
    """Return the value in types of JSON. A value of any other type becomes its ``repr``."""
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, int):
        return int(value) if -_LARGEST <= value < _LARGEST else str(value)
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, Mapping):
        return {encodable(str(name)): plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    try:
        return encodable(repr(value))
    except Exception:  # the user's own __repr__ may raise
        return f"({type(value).__name__})"
