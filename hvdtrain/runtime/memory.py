"""Keep freed memory for the next step, or give it back to the kernel. glibc only."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
_LARGEST_INT = (1 << 31) - 1
_LARGEST_MMAP_THRESHOLD = 4 * 1024 * 1024 * ctypes.sizeof(ctypes.c_long)  # DEFAULT_MMAP_THRESHOLD_MAX of malloc.c


def keep_freed_memory() -> bool:
    """Let malloc keep up to 2 GiB of freed memory, and reuse it also for tensors of up to 32 MiB.

    By default it gets large tensors from the kernel and gives them back, in every step, and each of their pages is
    filled with zeros again. Return whether that is possible here.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl, macOS
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD) and mallopt(_TRIM_THRESHOLD, _LARGEST_INT))


def return_freed_memory() -> None:
    """Give freed memory back to the kernel, also between memory in use.

    Tensors of less than 32 MiB may leave gaps that no tensor of the same size fits into (glibc before 2.38).
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
