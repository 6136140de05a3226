"""Text and plain values as files can hold them: messages of errors may carry bytes that are no text. A leaf."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LARGEST = 1 << 63


def encodable(text: str) -> str:
    """The same text, with what UTF-8 has no place for (lone surrogates) written as escapes."""
    return text.encode("utf-8", errors="backslashreplace").decode("utf-8")


def plain(value: Any) -> Any:
    """The same value, as JSON can hold it; what JSON knows nothing of is shown as Python does."""
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
    except Exception:  # a __repr__ of a user's own
        return f"({type(value).__name__})"
