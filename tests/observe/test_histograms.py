"""Histograms hold every value once, whatever the values are."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hvdtrain.observe.histograms import BINS, histogram, histograms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(1000,), (7, 11, 13), (1,), ()])
def test_every_value_is_counted_once(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    found = histogram(values)
    flat = values.double().reshape(-1)
    assert sum(found["counts"]) == found["num"] == flat.numel()
    assert found["limits"] == sorted(found["limits"])
    assert len(found["limits"]) == len(found["counts"]) <= BINS
    assert (found["min"], found["max"]) == (float(flat.min()), float(flat.max()))
    assert found["limits"][-1] == found["max"]
    assert found["sum"] == pytest.approx(float(flat.sum()), rel=1e-5, abs=1e-5)
    assert found["sum_squares"] == pytest.approx(float(flat.square().sum()), rel=1e-5)


def test_counts_lie_where_the_values_do() -> None:
    found = histogram(torch.tensor([0.0] * 5 + [1.0] * 3))
    assert found["counts"][0] == 5
    assert found["counts"][-1] == 3


def test_equal_values_are_one_bin() -> None:
    assert histogram(torch.full((4,), 2.5))["counts"] == [4.0]


def test_what_is_not_finite_is_counted_aside() -> None:
    found = histogram(torch.tensor([1.0, math.nan, math.inf, 2.0]))
    assert (found["num"], found["not_finite"], found["max"]) == (2.0, 2, 2.0)
    assert histogram(torch.tensor([math.nan]))["num"] == 0.0
    assert histogram(torch.empty(0))["num"] == 0.0


def test_of_a_model_with_and_without_gradients() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    model[0](torch.ones(3)).sum().backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = histograms(model)
    assert found["parameters"].keys() == before.keys()
    assert found["gradients"].keys() == {"0.weight", "0.bias"}
    assert found["gradients"]["0.bias"]["min"] == 1.0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
