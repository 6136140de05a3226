"""Text as machine words of 8 bytes at any place, so that array operations compare, read and hash it.

Numbers are read 8 digits at once, as in Daniel Lemire, "Quickly parsing eight digits" (2018).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Places = NDArray[np.int64]

PAD = 64
"""Blanks, so that what is looked for around the ends is looked for in vain."""

_U64 = np.uint64
_ZEROS, _NINES, _HIGH = _U64(0x3030303030303030), _U64(0x7676767676767676), _U64(0x8080808080808080)
_LOWER = np.array([(1 << (8 * n)) - 1 for n in range(9)], np.uint64)
"""Masks of the first 0 to 8 bytes of a word."""

_ODD = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5], np.uint64)


class Words:
    """Some text, which is copied.

    Attributes:
        text: with `PAD` blanks before and behind it.
        bytes: of the text alone [size].
        size: of the text.
    """

    def __init__(self, text: bytes | memoryview) -> None:
        self.text = b"".join((b" " * PAD, text, b" " * PAD))
        self.size = len(text)
        whole = np.frombuffer(self.text, np.uint8)
        self.bytes = whole[PAD:]
        self._words: NDArray[np.uint64] = np.ndarray((len(whole) - 7,), "<u8", self.text, strides=(1,))

    def cut(self, start: int, end: int) -> bytes:
        """A part of the text."""
        return self.text[PAD + start : PAD + end]

    def cuts(self, start: Places, end: Places) -> list[bytes]:
        """Parts of the text."""
        text, places = self.text, zip((start + PAD).tolist(), (end + PAD).tolist(), strict=True)
        return [text[begin:over] for begin, over in places]

    def all_of(self, character: str) -> Places:
        """Where a character stands."""
        return np.flatnonzero(self.bytes[: self.size] == ord(character))

    def find(self, what: bytes) -> Places:
        """Where `what` stands, of 8 bytes."""
        first = self.all_of(chr(what[0]))
        return np.asarray(first[self._at(first) == _word(what)])

    def are(self, places: Places, what: bytes) -> NDArray[np.bool_]:
        """Whether `what`, of 8 bytes or more, stands at each place."""
        found: NDArray[np.bool_] = self._at(places) == _word(what[:8])
        if len(what) > 8:
            found &= self._at(places + len(what) - 8) == _word(what[-8:])
        return found

    def numbers(self, start: Places, end: Places) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The numbers that stand between two places, and whether they are such: of 1 to 16 digits."""
        length = end - start
        good = (length > 0) & (length <= 16)
        value, is_good = self._eight(end, np.clip(length, 0, 8))
        good &= is_good
        if (length > 8).any():
            high, is_good = self._eight(end - 8, np.clip(length - 8, 0, 8))
            value += high * 100_000_000
            good &= is_good
        good &= (length == 1) | (self.bytes[np.minimum(start, self.size)] != ord("0"))
        return value, good

    def hashes(self, start: Places, length: Places) -> NDArray[np.uint64]:
        """Of texts of 32 bytes at most; of longer ones, of their first 32."""
        total = length.astype(np.uint64)
        for word, factor in enumerate(_ODD):
            kept = _LOWER[np.clip(length - 8 * word, 0, 8)]
            mixed = (self._at(start + 8 * word) & kept) * factor
            total = (total ^ mixed ^ (mixed >> _U64(32))) * _ODD[0]
        return total

    def _at(self, places: Places) -> NDArray[np.uint64]:
        return self._words[places + PAD]

    def _eight(self, end: Places, length: Places) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The `length` digits, 8 at most, before `end`."""
        digits = (self._at(end - 8) ^ _ZEROS) & ~_LOWER[8 - length]
        good = ((digits | (digits + _NINES)) & _HIGH) == 0
        digits = digits * _U64(10) + (digits >> _U64(8))
        low = (digits & _U64(0x000000FF000000FF)) * _U64(0x000F424000000064)
        high = ((digits >> _U64(16)) & _U64(0x000000FF000000FF)) * _U64(0x0000271000000001)
        return ((low + high) >> _U64(32)).astype(np.int64), good


def _word(text: bytes) -> Any:
    return _U64(int.from_bytes(text, "little"))
