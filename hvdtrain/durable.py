"""Write files that survive a power cut: a file reaches the disk before it is renamed into place. A leaf."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def fsync(path: Path) -> None:
    """Wait until a file, or a directory's list of names, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_folder(folder: Path) -> None:
    """Wait until every file in a folder, and the folder itself, are on disk."""
    for path in folder.iterdir():
        fsync(path)
    fsync(folder)


def write_text(path: Path, text: str) -> None:
    """Write a file completely or not at all. An error leaves no temporary file.

    Errors: OSError; UnicodeEncodeError if `text` cannot be encoded as UTF-8.
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
