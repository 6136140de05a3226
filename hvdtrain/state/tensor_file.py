"""Files of a checkpoint: one pass writes a file and computes its checksums, one pass verifies it, or a part of it.

A tensor file is a safetensors file: 8 bytes of length (little endian), a JSON header, raw data. The safetensors library
is not used, because it needs all data in memory again and computes no checksum.

The checksum is XXH3 with 128 bits. It detects damage by disks, cables and people, and is the only candidate that does
not slow down a disk of 1.5 to 2 GB/s (zlib.crc32, SHA-256 and BLAKE2b do, and ranks leave no core for another thread).
Each 4 MiB have a checksum of their own, with 64 bits, so that a rank reads no more than it needs.
"""

from __future__ import annotations

import errno
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
import xxhash
from torch import Tensor

from hvdtrain.errors import CheckpointError
from hvdtrain.files import fsync, open_regular
from hvdtrain.state.pieces import Place, StateDict

CHECKSUM = "xxh3_128"

_PIECES = "pieces"

_BLOCK = 1 << 20
_BUFFER = 1 << 16  # bytes of the buffer for small tensors; larger ones bypass it

CHECKED_BYTES = 4 << 20
"""Bytes of a file with a checksum of their own."""
_DIGITS = 16
"""Of such a checksum, hexadecimal."""
_FLUSH = 16 << 20
"""Bytes after which the kernel starts to write to disk. Writing everything at the end takes 1.4 times as long."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class FileDigest:
    """Size and checksums of a file when it was written."""

    size_bytes: int
    checksum: str  # hexadecimal
    blocks: str = ""  # those of each `CHECKED_BYTES`, one after the other; "" in files of older versions


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], progress: Callable[[], None], places: Mapping[str, Place] | None = None
) -> FileDigest:
    """Write a new safetensors file from tensors on any device, of any layout; call `progress` for each MiB.

    The header has the shape of the whole tensor and the offset of each piece in `places`.

    The kernel has started to write it to disk; the caller must fsync.

    Errors: CheckpointError: the format does not support a dtype; OSError: the file cannot be written.
    """
    # The format requires data without gaps; the widest dtypes come first for alignment.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    return _write(path, _parts(_header(names, tensors, places or {}), (tensors[name] for name in names)), progress)


def write_bytes(path: Path, content: bytes) -> FileDigest:
    """Write a new small file and wait until it is on disk. Errors: OSError."""
    digest = _write(path, [memoryview(content)], lambda: None)
    fsync(path)
    return digest


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


@dataclass(eq=False)
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


def read_tensors(
    path: Path, digest: FileDigest, progress: Callable[[], None], *, verifies_all: bool = True
) -> tuple[dict[str, StoredTensor], dict[str, tuple[list[int], list[int]]]]:
    """Return the tensors of a safetensors file, which are read when they are used.

    Every byte is verified now, or, if not `verifies_all`, what is used when it is.

    Also returns, for each tensor that is a piece, the shape of the whole tensor and the offset in it.

    Errors: CheckpointError: the file is missing or changed; ValueError: it is no safetensors file; OSError.
    """
    file = StoredFile(path, digest, progress)
    if verifies_all:
        file.verify()
    if len(file) < 8:
        raise ValueError("shorter than a header")
    (length,) = struct.unpack("<Q", file.read(0, 8).numpy().tobytes())
    if length > len(file) - 8:
        raise ValueError(f"a header of {length} bytes in a file of {len(file)}")
    header, pieces = _parse_header(file.read(8, 8 + length).numpy().tobytes())
    data_begin, end = 8 + length, 0
    for entry in sorted(header.values(), key=lambda entry: entry["data_offsets"]):
        begin, after = entry["data_offsets"]
        size = math.prod(entry["shape"]) * _DTYPES[entry["dtype"]].itemsize
        if (begin, after) != (end, end + size) or min(entry["shape"], default=0) < 0:
            raise ValueError(f"a tensor of {size} bytes at {begin} to {after}, where the last one ended at {end}")
        end = after
    if data_begin + end != len(file):
        raise ValueError(f"{end} bytes of tensors in {len(file) - data_begin}")
    found = {
        name: StoredTensor(file, data_begin + entry["data_offsets"][0], tuple(entry["shape"]), _DTYPES[entry["dtype"]])
        for name, entry in header.items()
    }
    return found, pieces


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, tuple[list[int], list[int]]]]:
    """Read what a file that was just written contains: entries of tensors, and pieces as `read_tensors` returns them.

    Errors: OSError.
    """
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return _parse_header(file.read(length))


def _parse_header(text: bytes) -> tuple[dict[str, Any], dict[str, tuple[list[int], list[int]]]]:
    header = json.loads(text)
    return header, json.loads(header.pop("__metadata__", {}).get(_PIECES, "{}"))


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
        for begin in range(0, count, _BLOCK):
            hasher.update(block[begin : min(begin + _BLOCK, count)])
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


def check_dtypes(state: StateDict) -> None:
    """Check that the format supports the dtype of every tensor. Errors: CheckpointError."""
    for tensors in state.tensors.values():
        for name, tensor in tensors.items():
            _check_dtype(name, tensor)


def _check_dtype(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in _NAMES:
        raise CheckpointError(
            f"{name} cannot be saved: its dtype is {tensor.dtype}", expected=f"one of {', '.join(_DTYPES)}"
        )


def damaged(path: Path, why: str = "", *, expected: str | None = None, found: str | None = None) -> CheckpointError:
    """Return the error for a damaged checkpoint, or one of its files."""
    return CheckpointError(
        f"{path} is damaged{why}", expected=expected, found=found, next_step="use another checkpoint"
    )


def _header(names: Iterable[str], tensors: Mapping[str, Tensor], places: Mapping[str, Place]) -> bytes:
    entries: dict[str, Any] = {}
    pieces = {name: [p.shape, p.offset] for name, p in places.items() if p.shape != tuple(tensors[name].shape)}
    if pieces:
        entries["__metadata__"] = {_PIECES: json.dumps(pieces)}  # the format allows only texts
    end = 0
    for name in names:
        tensor = tensors[name]
        _check_dtype(name, tensor)
        begin, end = end, end + tensor.numel() * tensor.dtype.itemsize
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _parts(header: bytes, tensors: Iterable[Tensor]) -> Iterator[memoryview]:
    yield memoryview(header)
    for tensor in tensors:
        if tensor.numel():
            plain = tensor.detach().cpu().contiguous()
            yield plain.reshape(-1).view(torch.uint8).numpy().data


def _write(path: Path, parts: Iterable[memoryview], progress: Callable[[], None]) -> FileDigest:
    hasher, of_block, blocks, room = xxhash.xxh3_128(), xxhash.xxh3_64(), [], CHECKED_BYTES
    size, flushed = 0, 0
    with path.open("xb", buffering=_BUFFER) as file:
        for part in parts:
            for begin in range(0, len(part), _BLOCK):
                block = part[begin : begin + _BLOCK]
                hasher.update(block)  # brings the block into the cache, from where it is written next
                file.write(block)
                size += len(block)
                while len(block) >= room:
                    of_block.update(block[:room])
                    blocks.append(of_block.hexdigest())
                    of_block, block, room = xxhash.xxh3_64(), block[room:], CHECKED_BYTES
                of_block.update(block)
                room -= len(block)
                progress()
                if size - flushed >= _FLUSH:
                    _begin_flush(file.fileno(), flushed, size - flushed)
                    flushed = size
        file.flush()
        _begin_flush(file.fileno(), flushed, size - flushed)
    if room < CHECKED_BYTES:
        blocks.append(of_block.hexdigest())
    return FileDigest(size, hasher.hexdigest(), "".join(blocks))


def _begin_flush(descriptor: int, begin: int, count: int) -> None:
    """Let the kernel write its pages of a file to disk. It also drops those on disk, which nobody reads."""
    with suppress(OSError):
        os.posix_fadvise(descriptor, begin, count, os.POSIX_FADV_DONTNEED)
