"""Tensor files are safetensors files, bit for bit, and give back what was written or nothing."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
import xxhash
from torch import Tensor

from hvdtrain.errors import CheckpointError
from hvdtrain.state.pieces import Assembly
from hvdtrain.state.stored_file import CHECKED_BYTES, FileDigest, StoredFile
from hvdtrain.state.tensor_file import _DTYPES, read_tensors, write_tensors
from tests.support.checkpoints import bits

SHAPES: list[tuple[int, ...]] = [(), (0,), (3, 0, 2), (1,), (7,), (5, 3, 2)]


def _random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Any bits at all, NaNs with payloads included."""
    count = int(torch.Size(shape).numel()) * dtype.itemsize
    high = 2 if dtype == torch.bool else 256
    return torch.randint(0, high, (count,), dtype=torch.uint8).view(dtype).reshape(shape)


def _all() -> dict[str, Tensor]:
    tensors = {f"{dtype}.{shape}": _random_bits(shape, dtype) for dtype in _DTYPES.values() for shape in SHAPES}
    tensors["not contiguous"] = torch.arange(12.0).reshape(3, 4).t()
    tensors["channels last"] = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    tensors["expanded"] = torch.ones(1).expand(4)
    tensors['nämé/with "quotes"\n'] = torch.ones(3, requires_grad=True)
    return tensors


def _one(data_offsets: list[int | None], shape: list[int]) -> str:
    return json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": data_offsets}})


def _read(path: Path, digest: FileDigest | None = None) -> dict[str, Tensor]:
    """Read a file; without a digest, of any content, as one that was written so."""
    content = path.read_bytes()
    digest = digest or FileDigest(len(content), xxhash.xxh3_128(content).hexdigest())
    return {name: tensor[...] for name, tensor in read_tensors(path, digest, lambda: None)[0].items()}


@pytest.mark.parametrize("tensors", [_all(), {}], ids=["all", "none"])
def test_bit_for_bit_by_the_library_and_by_us(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    facts = write_tensors(tmp_path / "t", tensors, lambda: None)
    assert bits(safetensors.torch.load_file(tmp_path / "t")) == bits(tensors)
    assert bits(_read(tmp_path / "t", facts)) == bits(tensors)
    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    safetensors.torch.save_file(contiguous, tmp_path / "library", metadata={"format": "pt"})
    assert bits(_read(tmp_path / "library")) == bits(tensors)


@pytest.mark.parametrize(
    ("header", "length"),
    [
        ("{}", 1 << 63),
        ("{}", (1 << 64) - 1),
        ("{}", 1 << 20),
        ("{}", 2),
        (_one([-8, 8], [2]), None),
        (_one([4, 8], [1]), None),
        (_one([0, 4], [1]), None),
        (_one([0, 8], [-1]), None),
        (_one([8, 4], [0]), None),
        (_one([0, 8], [3]), None),
        (_one([None, 8], [2]), None),
    ],
)
def test_a_header_that_does_not_fit_the_file_is_refused(header: str, length: int | None, tmp_path: Path) -> None:
    text = header.encode()
    (tmp_path / "t").write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + b" " * 8)
    with pytest.raises((ValueError, TypeError)):
        _read(tmp_path / "t")


def test_no_file_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "t").touch()
    with pytest.raises(FileExistsError):
        write_tensors(tmp_path / "t", {}, lambda: None)


def test_larger_than_any_block(tmp_path: Path) -> None:
    """40 MiB: several blocks, and what makes the kernel begin to write early."""
    tensors = {"a": _random_bits((40 << 20,), torch.uint8), "b": _random_bits((1001,), torch.float16)}
    moves: list[int] = []
    facts = write_tensors(tmp_path / "t", tensors, lambda: moves.append(1))
    assert len(moves) >= 40
    assert facts.size_bytes == (tmp_path / "t").stat().st_size
    assert bits(_read(tmp_path / "t", facts)) == bits(tensors)
    assert bits(safetensors.torch.load_file(tmp_path / "t")) == bits(tensors)


def test_tensors_that_are_read_keep_no_file_open(tmp_path: Path) -> None:
    """A checkpoint of a thousand ranks has more files than a process may open."""
    digest = write_tensors(tmp_path / "a", {"one": torch.ones(5)}, lambda: None)
    before = len([*Path("/proc/self/fd").iterdir()])
    read = [_read(tmp_path / "a", digest) for _ in range(8)]
    assert len([*Path("/proc/self/fd").iterdir()]) == before and torch.equal(read[7]["one"], torch.ones(5))


@pytest.mark.parametrize("blocks", [True, False], ids=["blocks", "of an older version"])
def test_only_what_is_used_is_verified(blocks: bool, tmp_path: Path) -> None:
    rows = 3 * CHECKED_BYTES // 4096
    value, path, seen = torch.arange(rows * 1024, dtype=torch.float32).reshape(rows, 1024), tmp_path / "a", list[int]()
    digest = write_tensors(path, {"a": value}, lambda: None)
    assert len(digest.blocks) == 16 * 4, "three and the header"
    if not blocks:
        digest = FileDigest(digest.size_bytes, digest.checksum)
    content = bytearray(path.read_bytes())
    content[2 * CHECKED_BYTES + 100] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged"):
        read_tensors(path, digest, lambda: None)
    if not blocks:
        with pytest.raises(CheckpointError, match="is damaged"):
            read_tensors(path, digest, lambda: None, verifies_all=False)
        return
    stored = read_tensors(path, digest, lambda: seen.append(1), verifies_all=False)[0]["a"]
    part = rows // 3
    assert torch.equal(stored[10 : part - 10, 3:5], value[10 : part - 10, 3:5]) and len(seen) == 1
    assert torch.equal(stored[part - 5 : part + 5], value[part - 5 : part + 5]) and len(seen) == 2
    with pytest.raises(CheckpointError, match=f"at byte {2 * CHECKED_BYTES}"):
        stored[2 * part + 1 :]
    with pytest.raises(CheckpointError, match=f"at byte {2 * CHECKED_BYTES}"):
        stored[...]
    path.unlink()
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="replaced while it was read"):
        stored[2 * part + 1 :]


def test_a_part_of_a_whole_needs_only_its_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    value, assembly = torch.randn(7, 6), Assembly()
    for number, (begin, end, left, right) in enumerate([(0, 3, 0, 6), (3, 7, 0, 2), (3, 7, 2, 6)]):
        digest = write_tensors(tmp_path / str(number), {"a": value[begin:end, left:right]}, lambda: None)
        stored, _ = read_tensors(tmp_path / str(number), digest, lambda: None, verifies_all=False)
        assembly.add("a", stored["a"], value.shape, (begin, left))
    whole, read, used = assembly.whole("a"), StoredFile.read, set[str]()

    def reading(file: StoredFile, begin: int, end: int) -> Tensor:
        used.add(file.path.name)
        return read(file, begin, end)

    monkeypatch.setattr(StoredFile, "read", reading)
    assert torch.equal(whole[3:6, 0:2], value[3:6, 0:2]) and used == {"1"}
    assert torch.equal(whole[2:6, 0:2], value[2:6, 0:2]) and used == {"0", "1"}
    assert torch.equal(whole[1:6, 1:5], value[1:6, 1:5]) and torch.equal(assembly["a"], value)
