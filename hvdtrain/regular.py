"""Open regular files for reading, but no FIFOs or devices, which can block the reader. A leaf."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file, or a link to one, for reading.

    Errors: OSError if it cannot be opened, or is no regular file; `strerror` names the kind.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # does not block on a FIFO
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            kind = "a FIFO" if stat.S_ISFIFO(mode) else "a device"
            raise OSError(errno.EINVAL, f"it is {kind}, not a file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path) -> bytes:
    """Read all of a regular file. Errors: see `open_regular`."""
    with open_regular(path) as file:
        return file.read()


def read_text_or_empty(path: Path) -> str:
    """Read a small text file, such as one of the kernel's; "" if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
