"""A file of a checkpoint as it is read: mapped, and verified by the checksums of when it was written.

The checksum is XXH3 with 128 bits. It detects damage by disks, cables and people, and is the only candidate that does
not slow down a disk of 1.5 to 2 GB/s (zlib.crc32, SHA-256 and BLAKE2b do, and ranks leave no core for another thread).
Each 4 MiB have a checksum of their own, with 64 bits, so that a rank reads no more than it needs.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
import xxhash
from torch import Tensor

from hvdtrain.errors import CheckpointError
from hvdtrain.files import open_regular

CHECKSUM = "xxh3_128"
BLOCK = 1 << 20
"""Bytes to hash at once."""
CHECKED_BYTES = 4 << 20
"""Bytes of a file with a checksum of their own."""
_DIGITS = 16
"""Of such a checksum, hexadecimal."""


@dataclass(frozen=True)
class FileDigest:
    """Size and checksums of a file when it was written."""

    size_bytes: int
    checksum: str  # hexadecimal
    blocks: str = ""  # those of each `CHECKED_BYTES`, one after the other; "" in files of older versions


class StoredFile:
    """A file of a checkpoint. `read` verifies what it returns, in blocks, each of them once.

    Without checksums of blocks, the first use verifies all. It is opened when it is used, and keeps no descriptor.

    Args:
        path: of the file.
        digest: of when it was written.
        progress: called for each verified block.
    """

    def __init__(self, path: Path, digest: FileDigest, progress: Callable[[], None]) -> None:
        self.path, self.digest, self._progress = path, digest, progress
        self._block = CHECKED_BYTES if digest.blocks else max(1, digest.size_bytes)
        self._verified: set[int] = set()
        self._data: Tensor | None = None
        self._inode = 0

    def __len__(self) -> int:
        return self.digest.size_bytes

    def read(self, begin: int, end: int) -> Tensor:
        """Return verified bytes; they are read again when they are used.

        Errors: CheckpointError: the file is missing or changed; OSError.
        """
        blocks = range(begin // self._block, (end - 1) // self._block + 1) if begin < end else range(0)
        wanted = [number for number in blocks if number not in self._verified]
        if wanted and not self.digest.blocks:
            self.verify()
        elif wanted or self._data is None:
            with self._opened() as file:
                for number in wanted:
                    found = xxhash.xxh3_64(os.pread(file.fileno(), self._block, number * self._block)).hexdigest()
                    if found != self.digest.blocks[number * _DIGITS : (number + 1) * _DIGITS]:
                        raise damaged(self.path, f" at byte {number * self._block}")
                    self._verified.add(number)
                    self._progress()
        assert self._data is not None
        return self._data[begin:end]

    def verify(self) -> None:
        """Verify all bytes. Errors: as of `read`."""
        with self._opened() as file:
            _verify(self.path, file, self.digest, self._progress)
        self._verified.update(range(-(-len(self) // self._block)))

    @contextmanager
    def _opened(self) -> Iterator[IO[bytes]]:
        """Open the file that is mapped, which the first call does."""
        with _opened(self.path, self.digest) as file:
            inode = os.fstat(file.fileno()).st_ino
            if self._data is None:
                self._inode, self._data = inode, _mapped(file, len(self))
            if inode != self._inode:
                raise damaged(self.path, ": it was replaced while it was read")
            yield file


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file. Only what is used is read and verified."""

    file: StoredFile
    begin: int  # its first byte in the file
    shape: tuple[int, ...]
    dtype: torch.dtype

    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    def __getitem__(self, box: Any) -> Tensor:
        """Return a part, as of a tensor. Errors: those of `StoredFile.read`."""
        strides = torch.empty(self.shape, dtype=self.dtype, device="meta")[box]
        first = self.begin + int(strides.storage_offset()) * self.dtype.itemsize
        count = 1 + sum((n - 1) * int(stride) for n, stride in zip(strides.shape, strides.stride(), strict=True))
        part = self.file.read(first, first + (count * self.dtype.itemsize if strides.numel() else 0))
        if part.data_ptr() % self.dtype.itemsize:  # a file from another program
            part = part.clone()
        return part.view(self.dtype).as_strided(strides.shape, strides.stride())


def read_verified(path: Path, digest: FileDigest, progress: Callable[[], None]) -> Tensor:
    """Verify all bytes of a file, and return them, mapped: the kernel can drop them from memory and read them again.

    Errors: CheckpointError if it is missing or changed; OSError.
    """
    with _opened(path, digest) as file:
        _verify(path, file, digest, progress)
        return _mapped(file, digest.size_bytes)


def _verify(path: Path, file: IO[bytes], digest: FileDigest, progress: Callable[[], None]) -> None:
    hasher = xxhash.xxh3_128()
    block = memoryview(bytearray(CHECKED_BYTES))
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)  # the kernel reads further ahead
    while count := file.readinto(block):  # type: ignore[attr-defined]
        for begin in range(0, count, BLOCK):
            hasher.update(block[begin : min(begin + BLOCK, count)])
            progress()
    if hasher.hexdigest() != digest.checksum:
        raise damaged(path, expected=_expected(digest), found=f"{CHECKSUM} {hasher.hexdigest()[:12]}...")


@contextmanager
def _opened(path: Path, digest: FileDigest) -> Iterator[IO[bytes]]:
    """Open a file of the size in its digest. Errors: CheckpointError if it has another size, or is none; OSError."""
    expected = _expected(digest)
    try:
        file = open_regular(path)
    except (FileNotFoundError, NotADirectoryError):
        raise damaged(path, expected=expected, found="no file") from None
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise damaged(path, f": {error.strerror}", expected=expected) from None
    with file:
        size = os.fstat(file.fileno()).st_size
        if size != digest.size_bytes:
            raise damaged(path, expected=expected, found=f"{size} bytes")
        yield file


def _expected(digest: FileDigest) -> str:
    return f"{digest.size_bytes} bytes with {CHECKSUM} {digest.checksum[:12]}..."


def _mapped(file: IO[bytes], size: int) -> Tensor:
    """Return the bytes of a file. Unlike with Python's mmap, no descriptor stays open: there may be thousands."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_file(f"/proc/self/fd/{file.fileno()}", shared=False, size=size, dtype=torch.uint8)


def damaged(path: Path, why: str = "", *, expected: str | None = None, found: str | None = None) -> CheckpointError:
    """Return the error for a damaged checkpoint, or one of its files."""
    return CheckpointError(
        f"{path} is damaged{why}", expected=expected, found=found, next_step="use another checkpoint"
    )
