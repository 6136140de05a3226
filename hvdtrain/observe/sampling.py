"""Samples of a sequence that no period of it can avoid, equal on all ranks. Pure."""

from __future__ import annotations

import zlib


def is_chosen(number: int, every: int) -> bool:
    """Return whether a number from 0 on is in a sample: one of each `every` consecutive ones, at a hashed place."""
    stretch, place = divmod(number, every)
    return zlib.crc32(stretch.to_bytes(8, "little")) % every == place
