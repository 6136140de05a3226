"""Read regular files only, and write files that survive a power cut. A leaf.

FIFOs and devices can block a reader. A written file reaches the disk before it is renamed into place.
"""

from __future__ import annotations

import errno
import grp
import json
import os
import pwd
import re
import resource
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO


def allow_open_files() -> None:
    """Raise this process's limit of open files to the highest that it may have; its children inherit that."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # some systems have a lower limit than they say
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def is_url(text: str) -> bool:
    """Return whether a text is an address such as s3://bucket/name, which as a path would be a folder ``s3:`` here."""
    return re.match(r"[A-Za-z][\w+.-]*:/", text) is not None


def is_private(found: os.stat_result) -> bool:
    """Check whether only root and this user can change a file. A group with the user's name counts as the user."""
    writers = stat.S_IWOTH | (0 if _is_own_group(found.st_gid) else stat.S_IWGRP)
    return found.st_uid in (0, os.geteuid()) and not found.st_mode & writers


def _is_own_group(gid: int) -> bool:
    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group.gr_name == user.pw_name and not set(group.gr_mem) - {user.pw_name}


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


class GrowingFile:
    """The lines of a regular file to which others append; each call of `new_lines` continues where the last one ended.

    `offset` is the end of the newest line, in bytes.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.offset = path, 0
        self._inode = -1

    def begins_again(self) -> bool:
        """Return whether the file is new, another one, or shorter than what was read: its lines start again.

        Errors: OSError, such as for a missing file.
        """
        found = self.path.stat()
        if found.st_ino == self._inode and found.st_size >= self.offset:
            return False
        self._inode, self.offset = found.st_ino, 0
        return True

    def new_lines(self, *, whole: bool) -> Iterator[bytes]:
        """Yield new lines; with `whole`, a last one only when it has ended. Errors: see `open_regular`."""
        with open_regular(self.path) as file:
            file.seek(self.offset)
            for line in file:
                if whole and not line.endswith(b"\n"):
                    return
                self.offset += len(line)
                yield line


def read_text_or_empty(path: Path) -> str:
    """Read a small text file, such as one of the kernel's; "" if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def read_object(path: Path) -> dict[str, Any]:
    """Read a small file with a JSON object; {} if it holds none, or cannot be read."""
    with suppress(OSError, ValueError):
        content = json.loads(path.read_text())
        return content if isinstance(content, dict) else {}
    return {}


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


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path; on success its file replaces `path`, also where others do so at the same time.

    An error leaves nothing. Errors: OSError.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.writing")
    try:
        yield temporary
        fsync(temporary)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    fsync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a file completely or not at all, see `replacing`.

    Errors: OSError; UnicodeEncodeError if `text` cannot be encoded as UTF-8.
    """
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
