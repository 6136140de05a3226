"""Every coding: what arrives is near to what was sent, on a CPU's runs of blocks and on all shards at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hvdtrain.compression import base
from hvdtrain.compression.coding import Coding
from hvdtrain.compression.int8 import ROWS
from hvdtrain.compression.sizes import BLOCK
from hvdtrain.compression.table import TABLE, parse

CODED = [name for name, kind in TABLE.items() if kind.coding]
LENGTHS = (1, BLOCK - 1, BLOCK, 3 * BLOCK + 7, 2 * ROWS * BLOCK, (ROWS + 1) * BLOCK + 5)


@pytest.fixture(params=["in runs", "at once"], autouse=True)
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "at once":
        monkeypatch.setattr(base, "processes_at_once", lambda device: True)


def _coding(name: str) -> Coding:
    coding = parse(name).load_coding(torch.device("cpu"))
    assert coding is not None
    return coding


def _shards(length: int) -> Tensor:
    """Return the shards of three ranks, of unlike sizes from block to block."""
    values = torch.randn(3, length, generator=torch.Generator().manual_seed(length))
    return values * 2.0 ** (torch.arange(length) // BLOCK % 40 - 20)


def _steps(name: str, shards: Tensor) -> Tensor:
    """Return the largest error of each value: half of a code, or of the last bit."""
    if name == "bf16":
        return shards.abs() * 2.0**-8
    if name == "fp16":
        return shards.abs() * 2.0**-11 + shards.abs().amax(1, keepdim=True) * 2.0**-38
    blocks = torch.nn.functional.pad(shards, (0, -shards.shape[1] % BLOCK)).view(3, -1, BLOCK)
    largest = blocks.abs().amax(2, keepdim=True).expand_as(blocks).reshape(3, -1)
    return largest[:, : shards.shape[1]] / 253


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", CODED)
def test_values_arrive_to_half_a_step(name: str, length: int) -> None:
    shards, coding = _shards(length), _coding(name)
    sent = coding.encode(shards)
    assert sent.dim() == 1 and (sent.nbytes < shards.nbytes * 2 / 3 or length < BLOCK)
    assert not len(sent) % 3, "an equal number of elements for each shard"
    for dtype, rounding in ((torch.float32, 0.0), (torch.float64, 0.0), (torch.bfloat16, 2.0**-8)):
        found = torch.full(shards.shape, float("nan"), dtype=dtype)
        coding.decode(sent, found)
        assert bool(((found.double() - shards).abs() <= _steps(name, shards) + rounding * shards.abs() * 1.1).all())
    total = torch.full((length,), float("nan"))
    coding.sum(sent, total)
    decoded = torch.empty(shards.shape)
    coding.decode(sent, decoded)
    torch.testing.assert_close(total, decoded.sum(0), rtol=1e-5, atol=1e-6 * float(decoded.abs().max()))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", CODED)
def test_what_is_not_finite_arrives_so(name: str, wrong: float) -> None:
    shards, coding = _shards(BLOCK + 9), _coding(name)
    shards[1, BLOCK + 3] = wrong
    found, total = torch.zeros(shards.shape), torch.zeros(shards.shape[1])
    coding.decode(coding.encode(shards), found)
    coding.sum(coding.encode(shards), total)
    assert not bool(found[1].isfinite().all()) and bool(found[0].isfinite().all())
    assert not bool(total.isfinite().all())


@pytest.mark.parametrize("name", CODED)
def test_a_coding_keeps_nothing_between_calls(name: str) -> None:
    coding, shards = _coding(name), _shards(BLOCK + 9)
    first = coding.encode(shards)
    coding.encode(1000 * _shards(3 * BLOCK + 70))
    assert torch.equal(first, coding.encode(shards))
