"""Files that survive a power cut: what is renamed into place has reached the disk before. A leaf."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def fsync(path: Path) -> None:
    """Wait until a file, or a directory's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_folder(folder: Path) -> None:
    """Wait for every file in a folder, and for the folder."""
    for path in folder.iterdir():
        fsync(path)
    fsync(folder)


def write_text(path: Path, text: str) -> None:
    """Write a file, whole or not at all; where it cannot be, nothing is left.

    Errors:
        OSError: it cannot be written there.
        UnicodeEncodeError: `text` is none.
    """
    temporary = path.with_name(f".{path.name}.writing")
    try:
        temporary.write_text(text, encoding="utf-8")
        fsync(temporary)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    fsync(path.parent)
