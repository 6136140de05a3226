"""JSON objects out of damaged text, one at a time. Slow: `hvdtrain.timeline.reading.events.decode` is tried first."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from hvdtrain.timeline.reading.events import LONGEST_BYTES, SEPARATORS

_DECODER = json.JSONDecoder(strict=False)
_USUAL_BYTES = 1 << 11
"""Tried first: the cost of a JSON error grows with the text before it."""

_CLOSE_BYTES = 16
"""An error this close to the end of the window may be due to the end of the window."""


@dataclass(frozen=True)
class Piece:
    """A JSON object with a key "ph", or text without one, and its position in the text."""

    offset: int
    end: int
    event: dict[str, Any] | None


def salvage(text: bytes, *, final: bool) -> tuple[list[Piece], int]:
    """Find the events in `text`, in order.

    Other objects count as text without an event, and so do events inside another object. Returns how many bytes the
    pieces cover too: all if nothing follows `text` (`final`), else up to an object that may continue after `text`.
    """
    pieces: list[Piece] = []
    if not text.strip(SEPARATORS):
        return pieces, len(text)
    covered, at = 0, 0
    while (at := _next_object(text, at, final=final)) >= 0:
        decoded = _decode(text, at)
        if decoded is None and not final and len(text) - at < LONGEST_BYTES:
            break
        event, end = decoded or ({}, at + 1)
        if "ph" in event:
            _add_damage(pieces, text, covered, at)
            covered = end
            pieces.append(Piece(at, covered, event))
        at = end
    taken = len(text) if at < 0 else at
    _add_damage(pieces, text, covered, taken)
    return pieces, taken


def _next_object(text: bytes, at: int, *, final: bool) -> int:
    """Return where the next object begins that may contain an event; -1 if there is none."""
    key = text.find(b'"ph"', at)
    if key < 0 and final:
        return -1
    return text.find(b"{", max(at, (key if key >= 0 else len(text)) - LONGEST_BYTES))


def _decode(text: bytes, at: int) -> tuple[dict[str, Any], int] | None:
    """Return the object that begins at `at`, and where it ends."""
    for size in (_USUAL_BYTES, LONGEST_BYTES):
        window = text[at : at + size].decode("latin-1")  # one character per byte
        try:
            event, length = _DECODER.raw_decode(window)
        except json.JSONDecodeError as error:
            if error.pos < len(window) - _CLOSE_BYTES and not error.msg.startswith("Unterminated"):
                return None
            continue
        except (ValueError, RecursionError):
            return None
        if not (plain := text[at : at + length]).isascii():
            event = json.loads(plain.decode("utf-8", "replace"), strict=False)
        return event, at + length
    return None


def _add_damage(pieces: list[Piece], text: bytes, start: int, end: int) -> None:
    """Add the text between two events, unless it consists of separators."""
    left = text[start:end].lstrip(SEPARATORS)
    if damaged := left.rstrip(SEPARATORS):
        begin = end - len(left)
        pieces.append(Piece(begin, begin + len(damaged), None))
