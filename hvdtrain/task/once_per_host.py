"""A folder that the processes of a host make together once, and all find whole afterwards."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import gettempdir, mkdtemp

from hvdtrain.durable import fsync, fsync_folder
from hvdtrain.errors import DataError

log = logging.getLogger(__name__)

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


def cache_folder(name: str) -> Path:
    """The user's cache folder for `name`. Creates nothing."""
    from hvdtrain.runtime.environment import environ

    return Path(environ().get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvdtrain" / name


def once_per_host(name: str, key: str, build: Callable[[Path], None], is_whole: Callable[[Path], bool]) -> Path:
    """The folder `key` of the cache `name`, built if it is not there yet.

    One process builds, the others of the host wait for it. The folder is built under another name, fsynced and
    renamed, so that it is whole whenever it is there, whoever was killed. Where the cache cannot be written, a
    folder of the user's in the system's temporary folder takes its place.

    Args:
        name: a folder in the cache.
        key: says all that the content depends on.
        build: fills the empty folder that it gets; DataError leaves nothing behind.
        is_whole: whether a folder holds what `build` writes.

    Errors:
        DataError: there is no place to write to.
    """
    own, substitute = cache_folder(name), Path(gettempdir()) / f"hvdtrain-{os.getuid()}" / name

    def found() -> Path | None:
        if is_whole(own / key):
            return own / key
        return substitute / key if _is_mine(substitute) and is_whole(substitute / key) else None

    if whole := found():
        return whole
    problems = []
    for place in (own, substitute):
        try:
            for folder in (place.parent, place):  # the mode holds for the last folder alone
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if place == substitute and not _is_mine(place):
                raise PermissionError(errno.EPERM, "it belongs to another user")
            return _build_in(place, key, build, found)
        except OSError as error:
            log.warning("cannot keep data in %s: %s", place, error.strerror or error)
            problems.append(f"{place}: {error.strerror or error}")
    raise DataError(
        "there is no place to keep the prepared data",
        expected="a folder with room that can be written to",
        found="; ".join(problems),
        next_step="make room, or point XDG_CACHE_HOME to a folder with room",
    )


def _build_in(place: Path, key: str, build: Callable[[Path], None], found: Callable[[], Path | None]) -> Path:
    final = place / key
    with _locked(place / f"{key}.lock") as alone:
        if whole := found():
            return whole
        if alone:  # what stands here was left by a process that was killed, or damaged since
            for left in [*place.glob(f"{key}.tmp-*"), final]:
                shutil.rmtree(left, ignore_errors=True)
        temporary = Path(mkdtemp(prefix=f"{key}.tmp-", dir=place))
        try:
            build(temporary)
            fsync_folder(temporary)
            _rename(temporary, final, found)
            fsync(place)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return final


def _rename(temporary: Path, final: Path, found: Callable[[], Path | None]) -> None:
    try:
        temporary.rename(final)
    except OSError:
        if not found():  # without locks another process may have been first: as good
            raise


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold the lock until the end, the process's death included. False: this file system has no locks."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            alone = False
        else:
            alone = True
        yield alone


def _is_mine(place: Path) -> bool:
    """Others may write to the system's temporary folder: trust only what is the user's own, up to there."""
    try:
        return all(folder.lstat().st_uid == os.getuid() for folder in (place, place.parent))
    except OSError:
        return False
