"""Events out of text that Horovod's writer would not have written so: damaged, or written again by another program."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

WINDOW = 1 << 16
"""Bytes within which an event has to end."""

_SEPARATORS = b" \t\r\n,[]\xef\xbb\xbf"  # and a byte order mark
_DECODER = json.JSONDecoder(strict=False)
_USUAL = 1 << 11
"""What is tried first: a failure takes as long as what is before it."""

_CLOSE = 16
"""Bytes before the end of what is tried; a failure there may be due to the end."""


@dataclass(frozen=True)
class Piece:
    """A JSON object that is an event, or a place where there is none.

    Attributes:
        offset, end: in the text.
        event: None where nothing could be read.
    """

    offset: int
    end: int
    event: dict[str, Any] | None


def salvage(text: bytes, *, final: bool) -> tuple[list[Piece], int]:
    """What `text` holds, in its order.

    An object that is no event counts as text that cannot be read, and so does an event inside of another object.

    Args:
        text: between two events, or all of it.
        final: nothing comes after it.

    Returns:
        The pieces, and how much of the text they tell of: all of it where `final`, else what comes before an object
        that may end behind it.
    """
    pieces: list[Piece] = []
    if not text.strip(_SEPARATORS):
        return pieces, len(text)
    seen, at = 0, 0
    while (at := _next_start(text, at, final=final)) >= 0:
        found = _decode(text, at)
        if found is None and not final and len(text) - at < WINDOW:
            break
        event, end = found or ({}, at + 1)
        if "ph" in event:
            _add_damage(pieces, text, seen, at)
            seen = end
            pieces.append(Piece(at, seen, event))
        at = end
    taken = len(text) if at < 0 else at
    _add_damage(pieces, text, seen, taken)
    return pieces, taken


def _next_start(text: bytes, at: int, *, final: bool) -> int:
    """Where the next object begins that may be an event or hold one; -1 where there is none."""
    key = text.find(b'"ph"', at)
    if key < 0 and final:
        return -1
    return text.find(b"{", max(at, (key if key >= 0 else len(text)) - WINDOW))


def _decode(text: bytes, at: int) -> tuple[dict[str, Any], int] | None:
    """The object that begins at `at`, and where it ends."""
    for size in (_USUAL, WINDOW):
        window = text[at : at + size].decode("latin-1")  # a character a byte
        try:
            event, length = _DECODER.raw_decode(window)
        except json.JSONDecodeError as error:
            if error.pos < len(window) - _CLOSE and not error.msg.startswith("Unterminated"):
                return None
            continue
        except (ValueError, RecursionError):
            return None
        if not (plain := text[at : at + length]).isascii():
            event = json.loads(plain.decode("utf-8", "replace"), strict=False)
        return event, at + length
    return None


def _add_damage(pieces: list[Piece], text: bytes, start: int, end: int) -> None:
    """The place between two events, if anything but separators stands there."""
    left = text[start:end].lstrip(_SEPARATORS)
    if kept := left.rstrip(_SEPARATORS):
        begin = end - len(left)
        pieces.append(Piece(begin, begin + len(kept), None))
