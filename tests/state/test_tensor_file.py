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

from hvdtrain.state.tensor_file import _DTYPES, FileDigest, read_tensors, write_tensors
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


def _read(path: Path) -> dict[str, Tensor]:
    """Read a file of any content as one that was written so."""
    content = path.read_bytes()
    return read_tensors(path, FileDigest(len(content), xxhash.xxh3_128(content).hexdigest()), lambda: None)[0]


@pytest.mark.parametrize("tensors", [_all(), {}], ids=["all", "none"])
def test_bit_for_bit_by_the_library_and_by_us(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    facts = write_tensors(tmp_path / "t", tensors, lambda: None)
    assert bits(safetensors.torch.load_file(tmp_path / "t")) == bits(tensors)
    assert bits(read_tensors(tmp_path / "t", facts, lambda: None)[0]) == bits(tensors)
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
    assert bits(read_tensors(tmp_path / "t", facts, lambda: None)[0]) == bits(tensors)
    assert bits(safetensors.torch.load_file(tmp_path / "t")) == bits(tensors)


def test_tensors_that_are_read_keep_no_file_open(tmp_path: Path) -> None:
    """A checkpoint of a thousand ranks has more files than a process may open."""
    digest = write_tensors(tmp_path / "a", {"one": torch.ones(5)}, lambda: None)
    before = len([*Path("/proc/self/fd").iterdir()])
    read = [read_tensors(tmp_path / "a", digest, lambda: None)[0] for _ in range(8)]
    assert len([*Path("/proc/self/fd").iterdir()]) == before and torch.equal(read[7]["one"], torch.ones(5))
