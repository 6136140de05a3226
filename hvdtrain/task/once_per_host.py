"""Build a folder once per host, for all of its processes."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp

from hvdtrain.errors import TransientDataError
from hvdtrain.files import fsync, fsync_folder
from hvdtrain.install.build_probe import cache_folder, is_mine, substitute_folder
from hvdtrain.runtime.environment import environ

log = logging.getLogger(__name__)

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


def once_per_host(
    name: str, key: str, build: Callable[[Path], None], is_whole: Callable[[Path], bool], *, continues: bool = False
) -> Path:
    """Return the folder `key` of the cache `name`; build it if it does not exist.

    One process builds while the others on the host wait. It builds under another name, fsyncs and renames, so an
    existing folder is complete even if a process was killed. If the cache is not writable, a folder of the user in
    the system's temporary folder is used instead.

    `key`: a hash of everything that the content depends on. `build`: fills the empty folder that it gets. If it raises,
    no folder remains. `is_whole`: returns whether a folder holds everything that `build` writes. `continues`: `build`
    continues what a killed or interrupted process, or a `TransientDataError`, has left in the folder.

    Errors: TransientDataError: neither folder is writable.
    """
    own, substitute = cache_folder(environ()) / name, substitute_folder() / name

    def find_whole() -> Path | None:
        if is_whole(own / key):
            return own / key
        return substitute / key if is_mine(substitute) and is_whole(substitute / key) else None

    if whole := find_whole():
        with suppress(OSError):
            os.utime(whole)  # its time is that of the last use
        return whole
    problems = []
    for place in (own, substitute):
        try:
            for folder in (place.parent, place):  # mkdir applies the mode to the last folder only
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if place == substitute and not is_mine(place):
                raise PermissionError(errno.EPERM, "it belongs to another user")
            return _build_in(place, key, build, find_whole, continues)
        except OSError as error:
            _warn_once(str(place), error.strerror or str(error))
            problems.append(f"{place}: {error.strerror or error}")
    raise TransientDataError(
        "no folder can store the prepared data",
        expected="a writable folder with free space",
        found="; ".join(problems),
        next_step="free some space, or set XDG_CACHE_HOME to a folder with free space",
    )


@lru_cache  # streamed text stores again and again
def _warn_once(place: str, why: str) -> None:
    log.warning("cannot store data in %s: %s", place, why)


def _build_in(
    place: Path, key: str, build: Callable[[Path], None], find_whole: Callable[[], Path | None], continues: bool
) -> Path:
    final = place / key
    with _locked(place / f"{key}.lock") as alone:
        if whole := find_whole():
            return whole
        continues = continues and alone
        partial = place / f"{key}.partial"
        if alone:  # left by a killed process, or damaged since
            for left in [*place.glob(f"{key}.tmp-*"), final, *([] if continues else [partial])]:
                shutil.rmtree(left, ignore_errors=True)
        temporary = partial if continues else Path(mkdtemp(prefix=f"{key}.tmp-", dir=place))
        keeps = False
        try:
            temporary.mkdir(exist_ok=True)
            try:
                build(temporary)
            except (TransientDataError, KeyboardInterrupt):
                keeps = continues
                raise
            fsync_folder(temporary)
            try:
                temporary.rename(final)
            except OSError:
                if not find_whole():  # without locks another process may have been first, which is fine
                    raise
            fsync(place)
        finally:
            if not keeps:
                shutil.rmtree(temporary, ignore_errors=True)
    return final


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold the lock until the end, or until the process dies. Yield False if the file system has no locks."""
    with path.open("a") as file:
        alone = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            alone = False
        yield alone
