from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hvdtrain.observe import histograms
from hvdtrain.observe.histograms import BINS, Histograms, histogram


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(1000,), (7, 11, 13), (1,), ()])
def test_every_value_is_counted_once(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """In the bins of NumPy."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    found = histogram(values)
    flat = values.double().reshape(-1)
    assert sum(found["counts"]) == found["num"] == flat.numel()
    assert (found["min"], found["max"]) == (float(flat.min()), float(flat.max()))
    assert found["sum"] == pytest.approx(float(flat.sum()), rel=1e-5, abs=1e-5)
    assert found["sum_squares"] == pytest.approx(float(flat.square().sum()), rel=1e-5)
    if flat.numel() == 1:  # equal values are one bin
        assert (found["counts"], found["limits"]) == ([1.0], [found["max"]])
        return
    counts, edges = np.histogram(flat.numpy(), BINS)
    assert found["counts"] == counts.tolist()
    assert found["limits"] == pytest.approx(edges[1:].tolist())
    assert found["limits"][-1] == found["max"]


@pytest.mark.parametrize("shape", [(41,), (3, 5, 7), (4, 6, 2, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_add_up_to_the_whole(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(dtype)
    values.view(-1)[7:14:3] = torch.tensor([math.nan, math.inf, -math.inf], dtype=dtype)
    whole = histogram(values)
    assert whole["not_finite"] == 3
    monkeypatch.setattr(histograms, "_CHUNK", 5)
    arranged = [values, values.transpose(0, -1)]
    arranged += [values.contiguous(memory_format=torch.channels_last)] if values.dim() == 4 else []
    for same in arranged:
        found = histogram(same)
        assert found.keys() == whole.keys()
        for name, value in whole.items():
            assert found[name] == pytest.approx(value, rel=1e-12), name


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError("kernel")])
def test_out_of_memory_costs_the_histogram_and_is_reported_once_other_errors_are_raised(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def small(values: Tensor) -> dict[str, Any]:
        if values.numel() > 5:
            raise error
        return histogram(values)

    told: list[str] = []
    made, model = Histograms(told.append), nn.Sequential(nn.Linear(3, 2), nn.Linear(4, 2))
    monkeypatch.setattr(histograms, "histogram", small)
    if str(error) == "kernel":
        with pytest.raises(RuntimeError, match="kernel"):
            made.summaries(model)
        return
    for _ in range(2):
        assert made.summaries(model)["parameters"].keys() == {"0.bias", "1.bias"}
    (line,) = told
    assert "0.weight" in line and "--observe.histograms_every 0" in line


def test_what_is_not_finite_is_counted_aside() -> None:
    found = histogram(torch.tensor([1.0, math.nan, math.inf, 2.0]))
    assert (found["num"], found["not_finite"], found["max"]) == (2.0, 2, 2.0)
    for nothing in (torch.tensor([math.nan]), torch.empty(0)):
        assert histogram(nothing)["num"] == 0.0
    for dtype in (torch.float16, torch.float32, torch.float64):
        info = torch.finfo(dtype)
        for ends in ([info.min, info.max], [0.0, info.smallest_normal], [0.0, info.smallest_normal * info.eps]):
            assert histogram(torch.tensor(ends, dtype=dtype))["num"] == 2.0, "the ends of a format are finite"


def test_of_a_model_with_and_without_gradients() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    model[0](torch.ones(3)).sum().backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = Histograms(pytest.fail).summaries(model)
    assert found["parameters"].keys() == before.keys()
    assert found["gradients"].keys() == {"0.weight", "0.bias"}
    assert found["gradients"]["0.bias"]["min"] == 1.0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
