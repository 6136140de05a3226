"""The bytes of a plain or gzip file, in pieces. Damaged compressed content gives a note, not an error."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hvdtrain.files import open_regular

_GZIP = b"\x1f\x8b"
_READ_BYTES = 1 << 18


def read_pieces(path: Path, size: int, notes: list[str]) -> Iterator[bytes]:
    """Yield the content of a file in pieces of about `size` bytes.

    Under any name, it may be plain, or one or several concatenated gzip streams. If compressed content is truncated or
    damaged, the content before that is yielded, and `notes` is appended to.

    Errors:
        OSError: it cannot be opened or read, or is no regular file.
    """
    with open_regular(path) as file:
        compressed = file.read(len(_GZIP)) == _GZIP
        file.seek(0)
        if not compressed:
            while piece := file.read(size):
                yield piece
            return
        yield from _inflated(iter(lambda: file.read(_READ_BYTES), b""), size, notes)


def _inflated(compressed: Iterator[bytes], size: int, notes: list[str]) -> Iterator[bytes]:
    engine = zlib.decompressobj(zlib.MAX_WBITS | 16)
    for given in compressed:
        rest = given
        while rest:
            if engine.eof:
                rest = rest.lstrip(b"\0")  # some tools pad the last block with zeros
                if not rest:
                    break
                engine = zlib.decompressobj(zlib.MAX_WBITS | 16)
            before = engine.copy()
            try:
                piece = engine.decompress(rest, size)
            except zlib.error as error:
                notes.append(f"the compressed content is damaged ({error}): the rest of the file was not read")
                yield from _up_to_damage(before, rest, size)
                return
            rest = engine.unused_data if engine.eof else engine.unconsumed_tail
            if piece:
                yield piece
    if not engine.eof:
        notes.append("the compressed content is truncated: the end of the file is missing")


def _up_to_damage(engine: zlib._Decompress, damaged: bytes, size: int) -> Iterator[bytes]:
    """Yield the content before the damage, byte by byte: a call that fails returns no bytes."""
    piece = bytearray()
    with suppress(zlib.error):
        for at in range(len(damaged)):
            piece += engine.decompress(damaged[at : at + 1])
            if len(piece) >= size:
                yield bytes(piece)
                piece.clear()
    yield bytes(piece)
