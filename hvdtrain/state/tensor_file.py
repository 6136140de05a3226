"""Write and read safetensors files of a checkpoint: one pass writes a file and computes its checksums.

A file has 8 bytes of length (little endian), a JSON header, raw data. The safetensors library is not used, because it
needs all data in memory again and computes no checksum. `stored_file` verifies what is read.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from hvdtrain.errors import CheckpointError
from hvdtrain.files import fsync
from hvdtrain.state.pieces import Place, StateDict
from hvdtrain.state.stored_file import BLOCK, CHECKED_BYTES, FileDigest, StoredFile, StoredTensor

_PIECES = "pieces"

_BUFFER = 1 << 16  # bytes of the buffer for small tensors; larger ones bypass it

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


def read_tensors(
    path: Path, digest: FileDigest, progress: Callable[[], None], *, verifies_all: bool = True
) -> tuple[dict[str, StoredTensor], dict[str, list[Any]]]:
    """Return the tensors of a safetensors file, which are read when they are used.

    Every byte is verified now, or, if not `verifies_all`, what is used when it is.

    Also returns, for each tensor that is a piece, the shape of the whole tensor and the offset in it; and if it has
    elements of a box there, the shape of the box, and the number of the first element: see `boxes_in`.

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


def boxes_in(
    tensor: StoredTensor, piece: Sequence[Any] | None
) -> Iterator[tuple[StoredTensor, Sequence[int], Sequence[int]]]:
    """Yield the boxes that a tensor of a file consists of, the shape of the whole tensor, and their offset in it.

    `piece`: as of `read_tensors`; None for a whole tensor. Errors: ValueError: it does not fit to the tensor.
    """
    shape, offset, *elements = piece or (tensor.shape, [0] * len(tensor.shape))
    if not elements:
        yield tensor, shape, offset
        return
    box, first = elements
    fits = len(tensor.shape) == 1 and len(box) == len(offset) == len(shape) and 0 < min(box) <= max(box) < 1 << 48
    if not fits or not tensor.numel() or not 0 <= first <= math.prod(box) - tensor.numel():
        raise ValueError(f"{tensor.numel()} elements from {first} of a box {box}")
    begin = tensor.begin
    for each in Place(tuple(shape), tuple(offset), (), tuple(box), first).part(tensor.shape).boxes:
        found = replace(tensor, begin=begin, shape=tuple(map(len, each)))
        yield found, shape, [indices.start for indices in each]
        begin += found.numel() * tensor.dtype.itemsize


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Read what a file that was just written contains: entries of tensors, and pieces as `read_tensors` returns them.

    Errors: OSError.
    """
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return _parse_header(file.read(length))


def _parse_header(text: bytes) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    header = json.loads(text)
    return header, json.loads(header.pop("__metadata__", {}).get(_PIECES, "{}"))


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


def _header(names: Iterable[str], tensors: Mapping[str, Tensor], places: Mapping[str, Place]) -> bytes:
    entries: dict[str, Any] = {}
    pieces = {
        name: [p.shape, p.offset, *([p.box, p.first] if p.box else ())]
        for name, p in places.items()
        if p.shape != tuple(tensors[name].shape)
    }
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
            for begin in range(0, len(part), BLOCK):
                block = part[begin : begin + BLOCK]
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
