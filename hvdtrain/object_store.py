"""A folder behind a URL, such as one of an object store, by fsspec. A leaf.

Credentials are those of the environment and of the files that the library of a store reads.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from hvdtrain.errors import ConfigError, StoreError, UnreachableStoreError

T = TypeVar("T")

LASTING = (FileNotFoundError, IsADirectoryError, PermissionError, ValueError, NotImplementedError)
"""Errors of a store that the same call would have again."""

_EXTRAS = {"s3": "s3", "s3a": "s3"}
_CREATES_ALONE = {"file", "local", "memory", "sftp", "ssh"}
_WITH_FOLDERS = {"file", "local", "memory", "sftp", "ssh", "ftp", "smb", "hdfs", "webhdfs"}


def open_url(url: str, option: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, and the path in it. `option` has named the URL.

    Errors: ConfigError: a package is missing, or no package knows the scheme.
    """
    try:
        fsspec = import_module("fsspec")
    except ModuleNotFoundError:
        what = f"{option} {url} needs the fsspec library"
        raise ConfigError(what, next_step='pip install "hvdtrain[data]"') from None
    try:
        system, path = fsspec.url_to_fs(url, use_listings_cache=False)
    except (ImportError, ValueError) as error:
        extra = _EXTRAS.get(url.partition(":")[0])
        raise ConfigError(
            f"there is no way to reach {url}",
            expected="a URL that fsspec and the packages of this machine support",
            found=str(error),
            next_step=f'pip install "hvdtrain[{extra}]"'
            if extra
            else f"install the package that it names, or correct {option}",
        ) from error
    if "file" in _names(system):
        system.auto_mkdir = True
    return system, path


def describe_fault(error: Exception) -> tuple[str, bool]:
    """Return what an error of a store says, and whether the same call would have it again."""
    cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
    if isinstance(error, LASTING):
        cause = error
    found = getattr(cause, "strerror", None) or f"{type(cause).__name__}: {cause}".partition("\n")[0]
    return found, isinstance(cause, LASTING) or getattr(cause, "status", 500) < 500


class StoreFolder:
    """The folder of a URL. Names of files in it are relative, with ``/``.

    All methods wait for the store. Errors: StoreError; UnreachableStoreError if another try may succeed.
    """

    def __init__(self, url: str, option: str) -> None:
        self.url, self._option = url.rstrip("/"), option
        self._system, path = open_url(url, option)
        self._path = path.rstrip("/")
        self._has_folders = bool(_names(self._system) & _WITH_FOLDERS)

    def sizes(self, within: str = "") -> dict[str, int]:
        """Return the size in bytes of each file below the folder, or below one in it."""

        def find() -> dict[str, int]:
            self._system.invalidate_cache()
            try:
                found = self._system.find(self._at(within), detail=True)
            except FileNotFoundError:  # of an object store: there is no such bucket
                if not self._has_folders:
                    raise
                return {}
            return {name[len(self._path) :].lstrip("/"): int(about["size"]) for name, about in found.items()}

        return self._do("listed", find)

    def read(self, name: str) -> bytes:
        """Return the content of a small file."""
        return self._do("read", lambda: bytes(self._system.cat_file(self._at(name))))

    def write(self, name: str, content: bytes) -> None:
        """Write a small file."""
        self._do("written", lambda: self._system.pipe_file(self._made(name), content))

    def create(self, name: str, content: bytes) -> bool:
        """Write a small file that does not exist; return False if it does. Of several writers, one gets True.

        This needs a store with conditional writes.
        """

        def create() -> bool:
            try:
                if _names(self._system) & _CREATES_ALONE:  # their pipe_file only looks first whether there is a file
                    with self._system.open(self._made(name), "xb") as file:
                        file.write(content)
                else:
                    self._system.pipe_file(self._made(name), content, mode="create")
            except Exception:  # of many classes; the answer may be lost of a request that was carried out
                try:
                    return bytes(self._system.cat_file(self._at(name))) == content
                except FileNotFoundError:
                    pass
                raise
            return True

        return self._do("written", create)

    def upload(self, path: Path, name: str) -> None:
        """Copy a file of this machine to the store."""
        self._do("written", lambda: self._system.put_file(str(path), self._made(name)))

    def download(self, name: str, path: Path) -> None:
        """Copy a file of the store to this machine."""
        self._do("read", lambda: self._system.get_file(self._at(name), str(path)))

    def copy(self, name: str, other: str) -> None:
        """Copy a file within the store."""
        self._do("written", lambda: self._system.cp_file(self._at(name), self._at(other)))

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; those that do not exist are ignored."""

        def remove() -> None:
            for name in names:
                with suppress(FileNotFoundError):
                    self._system.rm_file(self._at(name))

        self._do("removed", remove)

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}".rstrip("/")

    def _made(self, name: str) -> str:
        """Return the path of a file to write, in a folder that exists."""
        path = self._at(name)
        if self._has_folders:
            self._system.makedirs(posixpath.dirname(path), exist_ok=True)
        return path

    def _do(self, done: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except Exception as error:  # libraries of stores have classes of their own
            found, lasting = describe_fault(error)
            raise (StoreError if lasting else UnreachableStoreError)(
                f"{self.url} cannot be {done}",
                expected="a bucket or folder that exists, with permission to read, write, list and remove",
                found=found,
                next_step=f"check the address, the credentials of the environment, and {self._option}",
            ) from error


def _names(system: Any) -> set[str]:
    return {system.protocol} if isinstance(system.protocol, str) else set(system.protocol)
