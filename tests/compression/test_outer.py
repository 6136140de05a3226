"""Codings of the outer exchange: one suite for all of them."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hvdtrain.compression import base, outer
from hvdtrain.compression.outer import OuterCoding
from hvdtrain.compression.table import parse_outer
from hvdtrain.errors import ConfigError

ERRORS = {"bf16": 0.002, "int8": 0.008, "int4": 0.13, "int2": 0.35, "topk:0.03": 0.91, "topk:0.3": 0.6}
"""Relative error of one encoding of normal values."""
LENGTHS = [0, 1, 5, 255, 256, 257, 4095, 4096, 4097, 100_003]


def coding(name: str) -> OuterCoding:
    found = parse_outer(name).load()
    assert found is not None
    return found


def sent(name: str, values: torch.Tensor) -> torch.Tensor:
    """Return what arrives."""
    code = coding(name)
    payload = torch.full((code.payload_bytes(len(values)),), 77, dtype=torch.uint8)
    code.encode(values, payload)
    total = torch.zeros_like(values)
    code.add(payload, total)
    return total


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("length", LENGTHS)
def test_the_error_is_bounded_at_any_length(length: int, name: str) -> None:
    values = torch.randn(length, generator=torch.Generator().manual_seed(1)) * 1e-3
    found = sent(name, values)
    assert (found - values).norm() <= ERRORS[name] * values.norm() * (2 if length < 300 else 1)
    assert parse_outer(name).payload_bytes(length) == coding(name).payload_bytes(length)
    assert not sent(name, torch.zeros(length)).any()


@pytest.mark.parametrize("name", ERRORS)
def test_what_is_lost_is_delivered_later(name: str) -> None:
    """Law of error feedback: all that was sent and the residual are all that was given; the residual is bounded."""
    generator = torch.Generator().manual_seed(2)
    given, delivered, residual = (torch.zeros(9000, dtype=torch.float64) for _ in range(3))
    norms = []
    for _ in range(150):
        values = torch.randn(9000, generator=generator)
        given += values
        wanted = (residual + values).float()
        found = sent(name, wanted)
        delivered += found
        residual = wanted.double() - found
        norms.append(float(residual.norm()))
    assert torch.allclose(delivered + residual, given, atol=1e-3)
    assert max(norms[100:]) <= 1.3 * max(norms[50:100])


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_values_that_are_not_finite_are_not_hidden(name: str, bad: float) -> None:
    values = torch.randn(5000, generator=torch.Generator().manual_seed(4))
    values[4321] = bad
    assert not sent(name, values).isfinite().all()


@pytest.mark.parametrize("name", ERRORS)
def test_two_payloads_add_up_and_pieces_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = torch.randn(2, 70_001, generator=torch.Generator().manual_seed(5))
    code = coding(name)
    payloads = torch.zeros(2, code.payload_bytes(70_001), dtype=torch.uint8)
    before = first.clone()
    code.encode(first, payloads[0])
    code.encode(second, payloads[1])
    assert torch.equal(first, before)
    total = torch.zeros(70_001)
    for payload in payloads:
        code.add(payload, total)
    assert torch.equal(total, sent(name, first) + sent(name, second))
    for module, attribute, value in ((outer, "_AT_ONCE", 4096), (base, "processes_at_once", lambda device: True)):
        monkeypatch.setattr(module, attribute, value)
        assert torch.equal(sent(name, first) + sent(name, second), total)


@pytest.mark.parametrize("name", ERRORS)
def test_nothing_waits_for_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors have no values: code that reads one fails."""
    monkeypatch.setattr(base, "processes_at_once", lambda device: True)
    with FakeTensorMode():
        code, values = coding(name), torch.empty(5000)
        payload = torch.empty(code.payload_bytes(5000), dtype=torch.uint8)
        code.encode(values, payload)
        code.add(payload, values)


@pytest.mark.parametrize("name", ERRORS)
def test_a_large_value_survives(name: str) -> None:
    values = torch.randn(4096, generator=torch.Generator().manual_seed(6)) * 1e-6
    values[77] = -3.0
    assert sent(name, values)[77] == pytest.approx(-3.0, rel=0.01)


def test_zeros_next_to_values_stay_small() -> None:
    """Half of the rows of an embedding were not used."""
    values = torch.randn(2560, generator=torch.Generator().manual_seed(3)).index_fill(0, torch.arange(0, 2560, 2), 0.0)
    found = sent("int2", values)
    assert found[::2].abs().max() < 0.1 and (found - values).norm() < 0.45 * values.norm()


def test_sizes() -> None:
    sizes = [parse_outer(name).payload_bytes(1 << 20) / (1 << 20) for name in ("none", "bf16", "int8", "int4", "int2")]
    assert sizes == pytest.approx([4, 2, 1, 0.5, 0.25], rel=0.13)
    assert parse_outer("topk").payload_bytes(1 << 20) == 256 * 225  # 123 of 4096 values, at 14 bits
    assert parse_outer("none").load() is None


@pytest.mark.parametrize("text", ["", "int3", "int8:2", "topk:", "topk:0", "topk:0.6", "topk:x", "topk:nan", "none:"])
def test_other_names_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"outer\.compression"):
        parse_outer(text)
