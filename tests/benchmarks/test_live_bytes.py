"""benchmarks/live_bytes.py counts state and gradients at their worst moment, not parameters, inputs and activations."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.launch import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
live_bytes: Any = importlib.import_module("live_bytes")
activation_bytes: Any = importlib.import_module("activation_bytes")

SIZE = 64
WEIGHT = 4 * SIZE * SIZE
SCALARS = 64
"""Bytes of counters and the like."""


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(SIZE, SIZE, bias=False), nn.BatchNorm1d(SIZE, affine=False))


@pytest.fixture
def counts(model: nn.Module) -> Iterator[Any]:
    made = live_bytes.LiveBytes(model, [__file__])
    yield made
    made.close()


def _step(counts: Any, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    counts.begin(batch)
    kept = model(batch)  # an activation that is alive all the time
    optimizer.zero_grad()
    kept.square().sum().backward()
    optimizer.step()


def test_state_and_gradients_count_and_nothing_else(counts: Any, model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = torch.randn(8, SIZE)
    for _ in range(2):
        _step(counts, model, optimizer, batch)
    counts.close()
    for peak in counts.peaks:
        assert 2 * WEIGHT <= peak.state <= 2 * WEIGHT + SCALARS and peak.gradients == WEIGHT
        assert 3 * WEIGHT <= peak.total <= 3 * WEIGHT + SCALARS


def _exchange(gradient: Tensor) -> None:
    bucket = torch.cat([gradient.view(-1)] * 5)
    del bucket


def test_a_buffer_that_lives_for_a_moment_counts(counts: Any, model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters())
    weight: Any = next(model.parameters())
    hook = weight.register_post_accumulate_grad_hook(lambda parameter: _exchange(parameter.grad))
    _step(counts, model, optimizer, torch.randn(8, SIZE))
    hook.remove()
    counts.close()
    assert 6 * WEIGHT <= counts.peaks[0].total <= 6 * WEIGHT + SCALARS
    assert "test_live_bytes.py" in counts.peaks[0].moment


def test_a_storage_counts_once_and_whole(counts: Any, model: nn.Module) -> None:
    counts.begin(None)
    kept = [torch.zeros(1000)[part : part + 10] for part in (0, 500)]
    kept.append(kept[0].view(2, 5))
    indices = torch.arange(10_000)
    counts.close()
    assert counts.peaks[0].total == 2 * 4000 and len(indices) == 10_000


def test_what_lived_before_does_not_count(model: nn.Module) -> None:
    data = torch.zeros(1000)
    counts = live_bytes.LiveBytes(model, [])
    counts.begin(None)
    counts.close()
    assert counts.peaks[0].total == 0 and data.sum() == 0


def test_activations_count_while_they_live() -> None:
    x = torch.zeros(1000, requires_grad=True)
    with activation_bytes.Activations() as counted:
        for _ in range(3):
            kept = [x.tanh().tanh(), x.view(10, 100)]  # a view has no memory of its own
            del kept
    assert (counted.peak, counted.live) == (2 * 4000, 0)
