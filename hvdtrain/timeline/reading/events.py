"""Events of Horovod's Timeline, as horovod/common/timeline.cc writes them, decoded by msgspec.

An event with other fields, or with values out of range, is an error of the decoder. Names of tensors are found before:
Horovod writes them without escaping, so a name may look like JSON or like events.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

LONGEST_BYTES = 1 << 16
"""A longer event, or a longer tensor name, counts as damage."""

SEPARATORS = b" \t\r\n,[]\xef\xbb\xbf"
"""Bytes between events, the byte order mark included."""

_Us = Annotated[float, Meta(ge=0, lt=1e16)]
_Pid = Annotated[int, Meta(ge=0, lt=1 << 24)]


class _Event(msgspec.Struct, gc=False, tag_field="ph", forbid_unknown_fields=True):
    """What all kinds of events share: `ph` names the kind."""


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
    dur: Any = 0


class Mark(_Event, tag="i"):
    """A cycle of Horovod's background thread starts."""

    ts: _Us
    name: Any = None
    s: Any = None


class Metadata(_Event, tag="M"):
    """The name of tensor `pid`, or for pid 0 the wall clock at time 0."""

    pid: _Pid
    args: dict[str, Annotated[str, Meta(max_length=LONGEST_BYTES)] | float | bool | None]
    name: Any = None


Event = Begin | End | Tick | Mark | Metadata
_KINDS: dict[object, type[Event]] = {"B": Begin, "E": End, "X": Tick, "i": Mark, "M": Metadata}
_DECODER = msgspec.json.Decoder(list[Event])


def decode(text: bytes) -> list[Event] | None:
    """Decode consecutive events; None if anything else is between them."""
    try:
        events = _DECODER.decode(b"[%s]" % text.strip(SEPARATORS))
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    ranks = "".join([event.name for event in events if type(event) is Tick])
    return events if _are_digits(ranks or "0") else None


def _are_digits(text: str) -> bool:
    return text.isascii() and text.isdigit()


def is_foreign(fields: Mapping[str, Any]) -> bool:
    """Whether another program wrote this event: Horovod writes neither threads nor categories."""
    return "tid" in fields or "cat" in fields


def as_event(fields: Mapping[str, Any]) -> Event | None:
    """Return an event from its JSON object, unknown fields ignored; None if it is not one of Horovod's."""
    kind = _KINDS.get(fields["ph"]) if isinstance(fields["ph"], str) else None
    if kind is None or is_foreign(fields):
        return None
    try:
        event = msgspec.convert({key: fields[key] for key in ("ph", *kind.__struct_fields__) if key in fields}, kind)
    except (msgspec.ValidationError, OverflowError):
        return None
    return None if isinstance(event, Tick) and not _are_digits(event.name) else event


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
    total = _ITEM_BYTES[dtype]
    for length in re.findall(r"\d+", shape):
        total *= int(length)
    return total if total < 1 << 62 else -1


NAME_HEAD = b'{"name": "process_name"'
"""The first bytes of a tensor's metadata."""

_OPENING = re.compile(rb'\{"name": "process_name", "ph": "M", "pid": (\d{1,8}), "args": \{"name": "')
_CLOSING = b'"}},\n{"name": "process_sort_index", "ph": "M", "pid": %s, "args": {"sort_index": %s}},'
"""The bytes after a name, with the tensor's number. No name contains them by chance."""


def find_names(text: bytes) -> Iterator[tuple[int, int, int, str]]:
    """Yield begin and end of each tensor's metadata, the tensor's number and its name."""
    at = text.find(NAME_HEAD)
    while at >= 0:
        end = at + 1
        if found := _match(text, at):
            pid, name, end = found
            yield at, end, pid, name.decode("utf-8", "replace")
        at = text.find(NAME_HEAD, end)


def unfinished_name(text: bytes, end: int) -> int:
    """Return where metadata begins that may continue after `end`; -1 if there is none."""
    head = text.rfind(NAME_HEAD, max(0, end - LONGEST_BYTES), end)
    found = _match(text, head) if head >= 0 else None
    return -1 if found and found[2] <= end else head


def _match(text: bytes, at: int) -> tuple[int, bytes, int] | None:
    opening = _OPENING.match(text, at)
    if opening is None:
        return None
    begin = opening.end()
    closing = _CLOSING % (opening[1], opening[1])
    end = text.find(closing, begin, begin + LONGEST_BYTES + len(closing))
    return None if end < 0 else (int(opening[1]), text[begin:end], end + len(closing))
