"""A file's bytes in pieces, gzip'd or not; what cannot be read of it is said, not raised."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hvdtrain.regular import open_regular

_GZIP = b"\x1f\x8b"
_READ_BYTES = 1 << 18


def pieces(path: Path, size: int, notes: list[str]) -> Iterator[bytes]:
    """The content of `path`, some `size` bytes at a time, whatever its name ends in.

    Args:
        path: a file, gzip'd or not; one of several gzip'd parts too.
        size: bytes of a piece, about.
        notes: takes in a line where compressed content breaks off or is damaged; what came before it is given.

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
                rest = rest.lstrip(b"\0")  # what some tools fill the last block with
                if not rest:
                    break
                engine = zlib.decompressobj(zlib.MAX_WBITS | 16)
            before = engine.copy()
            try:
                piece = engine.decompress(rest, size)
            except zlib.error as error:
                notes.append(f"the compressed content is damaged ({error}): the rest of the file is not read")
                yield from _up_to_damage(before, rest, size)
                return
            rest = engine.unused_data if engine.eof else engine.unconsumed_tail
            if piece:
                yield piece
    if not engine.eof:
        notes.append("the compressed content breaks off: the end of the file is missing")


def _up_to_damage(engine: zlib._Decompress, damaged: bytes, size: int) -> Iterator[bytes]:
    """What comes before the damage, byte by byte: a call that meets it gives nothing of what it has read before."""
    piece = bytearray()
    with suppress(zlib.error):
        for at in range(len(damaged)):
            piece += engine.decompress(damaged[at : at + 1])
            if len(piece) >= size:
                yield bytes(piece)
                piece.clear()
    yield bytes(piece)
