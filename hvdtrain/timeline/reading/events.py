"""The bytes of a trace in chunks, and the events of Horovod's Timeline, as horovod/common/timeline.cc writes them.

msgspec decodes them; damaged text is searched object by object. Names of tensors are found before: Horovod writes them
without escaping, so a name may look like JSON or like events.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from hvdtrain.files import open_regular

LONGEST_BYTES = 1 << 16
"""A longer event, or a longer tensor name, counts as damage."""

SEPARATORS = b" \t\r\n,[]\xef\xbb\xbf"
"""Bytes between events, the byte order mark included."""

NAME_HEAD = b'{"name": "process_name"'
NAME = re.compile(
    rb'\{"name": "process_name", "ph": "M", "pid": (\d{1,8}), "args": \{"name": "(.{0,%d}?)"\}\},\n'
    rb'\{"name": "process_sort_index", "ph": "M", "pid": \1, "args": \{"sort_index": \1\}\},' % LONGEST_BYTES,
    re.DOTALL,
)
"""The metadata of a tensor, with its number and name. No name contains the bytes after it by chance."""


_Us = Annotated[float, Meta(ge=0, lt=1e16)]
_Pid = Annotated[int, Meta(ge=0, lt=1 << 24)]


class _Event(msgspec.Struct, gc=False, tag_field="ph", kw_only=True):
    """What all kinds of events share: `ph` names the kind. Horovod writes neither threads nor categories."""

    tid: None = None
    cat: None = None


class Begin(_Event, tag="B"):
    """An operation on tensor `pid` begins."""

    name: Annotated[str, Meta(min_length=1, max_length=LONGEST_BYTES)]
    ts: _Us
    pid: _Pid


class End(_Event, tag="E"):
    """The last operation on tensor `pid` that is still open ends."""

    ts: _Us
    pid: _Pid
    args: Any = None


class Tick(_Event, tag="X"):
    """Rank `name` is ready for the collective on tensor `pid`."""

    name: Annotated[str, Meta(min_length=1, max_length=7)]
    ts: _Us
    pid: _Pid


class Mark(_Event, tag="i"):
    """A cycle of Horovod's background thread starts."""

    ts: _Us


class Metadata(_Event, tag="M"):
    """The name of tensor `pid`, or for pid 0 the wall clock at time 0."""

    pid: _Pid
    args: dict[str, Annotated[str, Meta(max_length=LONGEST_BYTES)] | float | bool | None]
    name: Any = None


Event = Begin | End | Tick | Mark | Metadata
_EVENTS = msgspec.json.Decoder(list[Event])
_OBJECT = json.JSONDecoder(strict=False)
_USUAL_BYTES = 1 << 11
"""Tried first: the cost of a JSON error grows with the text before it."""


def decode(text: bytes) -> list[Event] | None:
    """Decode consecutive events; None if anything else is between them."""
    try:
        events = _EVENTS.decode(b"[%s]" % text.strip(SEPARATORS))
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    return events if _name_ranks(events) else None


def as_event(fields: dict[str, Any]) -> Event | None:
    """Return an event from its JSON object; None if it is not one of Horovod's."""
    try:
        event: Event = msgspec.convert(fields, Event)
    except (msgspec.ValidationError, OverflowError):
        return None
    return event if _name_ranks([event]) else None


def _name_ranks(events: Sequence[Event]) -> bool:
    """Whether the names of all ticks are numbers."""
    ranks = "".join([event.name for event in events if type(event) is Tick])
    return not ranks or (ranks.isascii() and ranks.isdigit())


def salvage(text: bytes) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield the JSON objects with a key "ph" in damaged text, in order, each with its begin and end.

    Text between them is yielded as an empty object. It includes other objects, and events inside another object. Slow.
    """
    covered = at = 0
    while (key := text.find(b'"ph"', at)) >= 0 and (at := text.find(b"{", max(at, key - LONGEST_BYTES))) >= 0:
        event, end = _object(text, at)
        if "ph" in event:
            yield from _damage(text, covered, at)
            yield at, end, event
            covered = end
        at = end
    yield from _damage(text, covered, len(text))


def _object(text: bytes, at: int) -> tuple[dict[str, Any], int]:
    """Return the object that begins at `at`, and where it ends; an empty one if it cannot be decoded."""
    for size in (_USUAL_BYTES, LONGEST_BYTES):
        try:
            event, length = _OBJECT.raw_decode(text[at : at + size].decode("latin-1"))  # one character per byte
        except (ValueError, RecursionError) as error:
            if getattr(error, "pos", size) < size // 2 and "Unterminated" not in str(error):
                break  # more text does not help
            continue
        if not (plain := text[at : at + length]).isascii():
            event = json.loads(plain.decode("utf-8", "replace"), strict=False)
        return event, at + length
    return {}, at + 1


def _damage(text: bytes, begin: int, end: int) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield the text between two events, unless it consists of separators."""
    left = text[begin:end].lstrip(SEPARATORS)
    if damaged := left.rstrip(SEPARATORS):
        yield end - len(left), end - len(left) + len(damaged), {}


_NUMPY_TYPES = ("uint8", "int8", "bool", "uint16", "int16", "float16", "int32", "float32", "int64", "float64")
_ITEM_BYTES = {"bfloat16": 2} | {name: np.dtype(name).itemsize for name in _NUMPY_TYPES}
_SHAPE = re.compile(r"\[\s*(?:\d{1,18}\s*(?:,\s*\d{1,18}\s*)*)?\]")


def nbytes(arguments: object) -> int:
    """Return the bytes of a tensor from ``{"dtype": "float32", "shape": "[2, 3]"}``; -1 if unknown."""
    if not isinstance(arguments, dict):
        return -1
    return _nbytes(str(arguments.get("dtype")), str(arguments.get("shape")))


@lru_cache(1 << 14)
def _nbytes(dtype: str, shape: str) -> int:
    if dtype not in _ITEM_BYTES or not _SHAPE.fullmatch(shape):
        return -1
    total = _ITEM_BYTES[dtype] * math.prod(map(int, re.findall(r"\d+", shape)))
    return total if total < 1 << 62 else -1


_GZIP = b"\x1f\x8b"
_READ_BYTES = 1 << 16
"""Of compressed content: about 1 MiB of a trace."""

_BETWEEN_EVENTS = re.compile(rb"\}\s*,\s*(?=\{)")


def read_chunks(path: Path, size: int, notes: list[str]) -> Iterator[bytes]:
    """Yield the content of a file in chunks of about `size` bytes, or of an event that is longer.

    Under any name, it may be plain, or one or several concatenated gzip streams. If compressed content is truncated or
    damaged, the content before that is yielded, and `notes` is appended to.

    Errors: OSError: it cannot be opened or read, or is no regular file.
    """
    text = b""
    with open_regular(path) as file:
        compressed = file.read(len(_GZIP)) == _GZIP
        file.seek(0)
        pieces = iter(lambda: file.read(_READ_BYTES if compressed else size), b"")
        for piece in _inflated(pieces, notes) if compressed else pieces:
            text += piece
            end = _last_boundary(text)
            yield text[:end]
            text = text[end:]
    yield text


def _last_boundary(text: bytes) -> int:
    """Return where the last event begins, or metadata that may be incomplete; 0 if there is no such place."""
    near = _BETWEEN_EVENTS.finditer(text, max(0, len(text) - 2 * LONGEST_BYTES))
    end = max((found.end() for found in near), default=0)
    head = text.rfind(NAME_HEAD, max(0, (end or len(text)) - LONGEST_BYTES), end or len(text))
    if head >= 0 and not NAME.match(text, head, end):
        end = head - 2 if text[head - 2 : head] == b"[\n" else head
    if end == 0 and len(text) > 2 * LONGEST_BYTES:  # an event that is too long
        return len(text) - LONGEST_BYTES
    return end


def _inflated(compressed: Iterator[bytes], notes: list[str]) -> Iterator[bytes]:
    engine = zlib.decompressobj(zlib.MAX_WBITS | 16)
    for given in compressed:
        rest = given
        while rest:
            if engine.eof:
                rest = rest.lstrip(b"\0")  # some tools pad the last block with zeros
                engine = zlib.decompressobj(zlib.MAX_WBITS | 16) if rest else engine
                continue
            before = engine.copy()
            try:
                yield engine.decompress(rest)
            except zlib.error as error:
                notes.append(f"the compressed content is damaged ({error}): the rest of the file was not read")
                yield _up_to_damage(before, rest)
                return
            rest = engine.unused_data
    if not engine.eof:
        notes.append("the compressed content is truncated: the end of the file is missing")


def _up_to_damage(engine: zlib._Decompress, damaged: bytes) -> bytes:
    """Return the content before the damage, byte by byte: a call that fails returns no bytes."""
    piece = bytearray()
    with suppress(zlib.error):
        for at in range(len(damaged)):
            piece += engine.decompress(damaged[at : at + 1])
    return bytes(piece)
