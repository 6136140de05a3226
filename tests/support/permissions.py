"""Permissions that hold for root too: without the capabilities that pass over them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

_VERSION_3 = 0x20080522
_OVERRIDE = 1 << 1 | 1 << 2
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, see capabilities(7)."""


@contextmanager
def held() -> Iterator[None]:
    """Inside, this thread, and those it starts, may open files only as their modes say."""
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = (ctypes.c_uint32 * 2)(_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0
    before = sets[0]
    sets[0] &= ~_OVERRIDE  # of the effective set; the permitted one keeps them
    assert libc.capset(header, sets) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        sets[0] = before
        assert libc.capset(header, sets) == 0
