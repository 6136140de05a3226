"""The bytes of a plain or gzip trace, in chunks that end between two events.

Damaged compressed content gives a note, not an error.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hvdtrain.files import open_regular
from hvdtrain.timeline.reading.events import LONGEST_BYTES, NAME, NAME_HEAD

_GZIP = b"\x1f\x8b"
_READ_BYTES = 1 << 16
"""Of compressed content: about 1 MiB of a trace."""

_BETWEEN_EVENTS = re.compile(rb"\}\s*,\s*(?=\{)")


def read_chunks(path: Path, size: int, notes: list[str]) -> Iterator[bytes]:
    """Yield the content of a file in chunks of about `size` bytes, or of an event that is longer.

    Under any name, it may be plain, or one or several concatenated gzip streams. If compressed content is truncated or
    damaged, the content before that is yielded, and `notes` is appended to.

    Errors:
        OSError: it cannot be opened or read, or is no regular file.
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
